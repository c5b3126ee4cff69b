"""A TCP proxy between two actors, for tests: it holds back what is under way, and cuts its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket


class Proxy:
    """Forwards both ways between whoever connects to `endpoint` and the address of its target."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.removeprefix("tcp://").rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._may_flow = asyncio.Event()
        self._may_flow.set()
        self._may_connect = asyncio.Event()
        self._may_connect.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_accepted = 0
        self._num_before_cut = 0
        self._has_accepted = asyncio.Event()
        self.holds = asyncio.Event()
        """Something came since `hold`, and waits."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    def hold(self) -> None:
        """Keep to itself what comes from now on."""
        self._may_flow.clear()
        self.holds.clear()

    def release(self) -> None:
        self._may_flow.set()

    def cut(self, *, may_return: bool = True) -> None:
        """End all connections, and lose what was held back.

        Args:
            may_return: False lets nobody through until `heal`.
        """
        if not may_return:
            self._may_connect.clear()
        self._num_before_cut = self._num_accepted
        for writer in self._writers:
            writer.transport.abort()
        self._may_flow.set()

    async def accepted(self) -> None:
        """Wait for a connection since the last cut; it may be waiting for `heal`."""
        while self._num_accepted == self._num_before_cut:
            self._has_accepted.clear()
            await self._has_accepted.wait()

    async def refuse(self) -> None:
        """Cut, and listen no more until `heal`."""
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    async def heal(self) -> None:
        """Let through who comes from now on, or waits."""
        self._may_connect.set()
        if not self._server.is_serving():
            self._listener = socket.create_server(("127.0.0.1", int(self.endpoint.rpartition(":")[2])))
            await self.start()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_accepted += 1
        self._has_accepted.set()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            await self._may_connect.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
            self._writers.add(far_writer)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._forward(reader, far_writer))
                    group.create_task(self._forward(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except (OSError, ExceptionGroup):
            pass  # an end is gone, so the other one goes too
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if not self._may_flow.is_set():
                    self.holds.set()
                await self._may_flow.wait()
                if writer.transport.is_closing():
                    break
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError
