"""Both ends of one edge back to back, driven at random: order, completeness, bounds, and no deadlock."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_bus.core.edge import InEdge, OutEdge
from omni_bus.ids import Peer
from omni_bus.wire.frames import Chunk, Close, Finish, Open, Route, RouteEdge
from omni_bus.wire.payloads import HEADER_BYTES, Payload, Text, size_of


class FlowControl(RuleBasedStateMachine):
    """An `OutEdge` and an `InEdge` with a FIFO link each way; the model is the list of what was pushed."""

    @initialize(window_chunks=st.integers(1, 9), window_bytes=st.integers(1, 3000))
    def connect(self, window_chunks, window_bytes):
        edge = RouteEdge("in", "a", "stage", "b", "text", window_chunks, window_bytes)
        route = Route("r", "p", Peer("gateway", 1, ""), {"stage": Peer("stage.0", 2, "")}, (edge,))
        self.window_chunks, self.window_bytes = window_chunks, window_bytes
        self.sender = OutEdge(route, 0, {})
        self.receiver = InEdge(route, 0)
        self.is_open = False
        self.forth: deque = deque()
        self.back: deque = deque()
        self.pushed: list[Text] = []
        self.received: list[Payload] = []
        self.num_consumed = 0
        self.is_finished = False
        self.was_abandoned = False

    @precondition(lambda self: not self.is_finished)
    @rule(length=st.one_of(st.integers(0, 40), st.integers(0, 6000)))
    def push(self, length):
        payload = Text(f"{len(self.pushed)}:" + "x" * length)
        self.pushed.append(payload)
        self.forth += self.sender.push(payload)

    @precondition(lambda self: not self.is_finished)
    @rule()
    def finish(self):
        self.is_finished = True
        self.forth += self.sender.finish(Finish("stop"))

    @rule()
    def abandon(self):
        """What waits for credit is dropped; what was sent still arrives."""
        self.is_finished = self.was_abandoned = True
        self.forth += self.sender.abandon()

    @precondition(lambda self: self.forth)
    @rule()
    def deliver_forth(self):
        frame = self.forth.popleft()
        if isinstance(frame, Open):
            assert not self.is_open
            self.is_open = True
        elif isinstance(frame, Chunk):
            assert self.is_open
            self.receiver.accept(frame)
            self.received.append(frame.payload)
        else:
            assert isinstance(frame, Close)
            self.receiver.close(frame)

    @precondition(lambda self: self.back)
    @rule()
    def deliver_back(self):
        self.forth += self.sender.grant(self.back.popleft())

    @precondition(lambda self: self.num_consumed < len(self.received))
    @rule()
    def consume(self):
        credit = self.receiver.consume(self.received[self.num_consumed])
        self.num_consumed += 1
        if credit is not None:
            self.back.append(credit)

    @rule()
    def discard(self):
        credit = self.receiver.discard()
        self.num_consumed = len(self.received)
        if credit is not None:
            self.back.append(credit)

    @precondition(lambda self: self.forth or self.back or self.num_consumed < len(self.received))
    @rule()
    def settle(self):
        """Deliver and consume all there is; then nothing may be held back: that would be a deadlock."""
        while self.forth or self.back or self.num_consumed < len(self.received):
            if self.forth:
                self.deliver_forth()
            elif self.back:
                self.deliver_back()
            else:
                self.consume()
        assert not self.sender.is_blocked
        if not self.was_abandoned:
            assert self.received == self.pushed
        assert self.receiver.is_closed == self.is_finished
        assert self.receiver.buffered == (0, 0)

    @invariant()
    def what_came_is_what_was_sent_in_order(self):
        if hasattr(self, "pushed"):
            assert self.received == self.pushed[: len(self.received)]
            assert self.receiver.num_received == len(self.received)

    @invariant()
    def credit_is_never_negative_nor_exceeded(self):
        if not hasattr(self, "sender"):
            return
        left, buffered = self.sender.credit_left, self.receiver.buffered
        assert left.chunks >= 0
        assert left.bytes >= 0
        assert 0 <= buffered.chunks <= self.window_chunks
        assert 0 <= buffered.bytes <= self.window_bytes
        under_way = sum(isinstance(frame, Chunk) for frame in self.forth)
        assert under_way + buffered.chunks <= self.window_chunks

    @invariant()
    def memory_is_bounded(self):
        """At most a window of ordinary chunks, or two that are larger than half of it, are between the ends."""
        if not hasattr(self, "sender"):
            return
        sizes = [size_of(frame.payload) for frame in self.forth if isinstance(frame, Chunk)]
        sizes += [size_of(payload) for payload in self.received[self.num_consumed :]]
        large = [size for size in sizes if size > max(1, self.window_bytes // 2)]
        assert sum(size for size in sizes if size not in large) <= self.window_bytes
        # A window of one byte has no half: each chunk costs all of it.
        assert len(large) <= 3 - (self.window_bytes % 2 == 0 or self.window_bytes == 1)

    @invariant()
    def nothing_waits_that_could_go(self):
        if hasattr(self, "sender") and self.sender.is_blocked:
            left = self.sender.credit_left
            first = self.pushed[self.sender.num_sent]
            charge = min(size_of(first), max(1, self.window_bytes // 2))
            assert left.chunks < 1 or left.bytes < charge
            assert self.sender.pending_bytes >= HEADER_BYTES


TestFlowControl = FlowControl.TestCase
TestFlowControl.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
