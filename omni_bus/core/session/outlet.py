"""Where a session's words leave it: to whom, in which order, and again after a resume."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from msgspec.structs import replace

from omni_bus.core.session import server_events as said
from omni_bus.core.session.codec import encoded
from omni_bus.core.session.codes import Code, SessionError
from omni_bus.core.session.effects import Effect, Emit, EndAttachment
from omni_bus.core.session.journal import Journal, JournalConflict, JournalGap

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_bus.core.session.client_events import SessionResume
    from omni_bus.core.session.limits import Limits


class Outlet:
    """Collects the effects of one call; holds the journal and knows the attachment that listens.

    Args:
        session_id: names the session in events.
        limits: of the journal.
        new_token: returns a secret that nobody can guess; only its hash is kept.
        is_resumable: whether there is another attachment after the first.
    """

    def __init__(self, session_id: str, limits: Limits, new_token: Callable[[], str], *, is_resumable: bool) -> None:
        self.now = 0.0
        self.is_resumable = is_resumable
        self.attachment: int | None = None
        self.generation = 0
        self.journal = Journal(limits.journal_bytes, limits.journal_ttl_s, is_kept=is_resumable)
        self._session_id = session_id
        self._new_token = new_token
        self._token_hash = b""
        self._former_hash = b""
        """Of the token that the present attachment came with, until it has shown that it got the next one."""
        self._effects: list[Effect] = []
        self._num_events = 0
        self._is_overflow_told = False

    def take(self) -> list[Effect]:
        """Return what was collected, and begin anew."""
        effects, self._effects = self._effects, []
        return effects

    def do(self, effect: Effect) -> None:
        """Ask the host for something."""
        self._effects.append(effect)

    def emit(self, event: said.AnyServerEvent) -> None:
        """Say something to the client: now if it listens, and again if it resumes."""
        entry = self.journal.add(self._named(event), self.now)
        if self.attachment is not None:
            self._effects.append(Emit(self.attachment, entry.event, entry.data))
            if self.journal.has_overflowed and not self._is_overflow_told:
                self._is_overflow_told = True
                self.tell(self.attachment, said.ResyncRequired(session_id=self._session_id, reason="journal_overflow"))

    def tell(self, attachment: int, event: said.AnyServerEvent) -> None:
        """Say something to one attachment only; it is not kept."""
        event = self._named(event)
        self._effects.append(Emit(attachment, event, encoded(event)))

    def refuse(self, attachment: int, error: SessionError, event_id: str | None) -> None:
        """Turn an attachment away that is not, or not yet, the session's."""
        self.tell(attachment, said.ErrorEvent(error=error.detail(event_id)))
        self.end(attachment, error.code.vendor_code)

    def end(self, attachment: int, reason: str) -> None:
        """Let an attachment go."""
        self._effects.append(EndAttachment(attachment, reason))

    def attach(self, attachment: int) -> str | None:
        """Talk to this attachment from now on; return the token that resumes the session, if it can be."""
        self.attachment = attachment
        self.generation += 1
        if not self.is_resumable:
            return None
        token = self._new_token()
        self._token_hash = _hash(token)
        return token

    def resume(self, attachment: int, event: SessionResume, view: Callable[[], said.SessionView]) -> None:
        """Talk to another attachment, beginning with what it missed.

        Raises:
            SessionError: it may not, or claims what can't be.
        """
        if not self.is_resumable:
            raise SessionError(Code.RESUME_UNSUPPORTED, "this session can't be resumed")
        presented = _hash(event.resume_token)
        if not any(hmac.compare_digest(presented, known) for known in (self._token_hash, self._former_hash)):
            raise SessionError(Code.INVALID_TOKEN, "resume_token: it is not the last one", param="resume_token")
        seq = event.last_received_server_event_seq
        try:
            missed = self.journal.since(seq, self.now)
        except JournalConflict:
            message = f"last_received_server_event_seq: {seq} came, the last event was {self.journal.head}"
            raise SessionError(Code.RESUME_CONFLICT, message, param="last_received_server_event_seq") from None
        except JournalGap:
            self.tell(attachment, said.ResyncRequired(session_id=self._session_id, reason="journal_gap"))
            self.end(attachment, "journal_gap")
            return
        former, former_generation = self.attachment, self.generation
        token = self.attach(attachment)
        assert token is not None
        self._former_hash = presented
        self.tell(
            attachment,
            said.SessionResumed(
                session_id=self._session_id,
                session=view(),
                attachment_generation=self.generation,
                resume_token=token,
            ),
        )
        for entry in missed:
            self._effects.append(Emit(attachment, entry.event, entry.data))
        if former is not None:
            replaced = said.SessionReplaced(session_id=self._session_id, attachment_generation=former_generation)
            self.tell(former, replaced)
            self.end(former, "session_replaced")

    def confirm(self) -> None:
        """The attachment is heard, so it got its token, and the former one is worth nothing any more."""
        self._former_hash = b""

    def _named(self, event: said.AnyServerEvent) -> said.AnyServerEvent:
        self._num_events += 1
        return replace(event, event_id=f"event_{self._num_events:x}")


def turned_away(attachment: int, error: SessionError, event_id: str | None) -> list[Effect]:
    """Return what is done with an attachment that there is no session for."""
    event = said.ErrorEvent(event_id="event_0", error=error.detail(event_id))
    return [Emit(attachment, event, encoded(event)), EndAttachment(attachment, error.code.vendor_code)]


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
