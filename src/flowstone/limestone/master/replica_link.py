"""The link of a master to one replica: connect, catch up, replicate, and reconnect after a loss.

Relies on `catch_up.py` for the sessions that a replica lacks. Never decides whether an epoch may be durable without the
replica: `propagation.py` does.

Theory of operation
-------------------

A link outlives its connections; each connection is a `Conversation`. The state of the link changes along TRANSITIONS:

- CONNECTING: the link connects and opens the control channel. A Flowstone replica reports the epoch and the master of
  its data in the answer to HELLO; PREPARE then makes it resume after an epoch, or put its data aside and be seeded.
- CATCHING_UP: the link sends the sessions that the replica lacks, from the log files of the master. The replica
  receives live sessions already.
- LIVE: the replica has everything that the master has, and counts towards the quorum.
- LOST: the connection failed, or the replica rejected something. The link connects again after a pause, which doubles
  up to `RETRY_SECONDS_MAX`.
- GONE: the link is closed, or a retry cannot help. The original's replica is used only once: it cannot be told where to
  resume, so it goes from CONNECTING to LIVE, and is gone after its first loss.

Invariants:

- A session is sent on a connection either live or from the log files, never in both ways.
- A replica counts for an epoch only after it has acknowledged the commit of that epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Protocol

from flowstone.errors import FlowstoneError
from flowstone.limestone.format import lineage
from flowstone.limestone.format import wire_extensions as extensions
from flowstone.limestone.format.messages import CommonAck
from flowstone.limestone.format.wire_extensions import NONCE_SIZE, SEED_CHANNEL_MAX, Action, Hello, HelloAck, Prepare
from flowstone.limestone.master.catch_up import CatchUpStore, LogFiles, LogSurvey, decide, open_files
from flowstone.limestone.master.conversation import (
    Answer,
    AuthenticationFailed,
    Conversation,
    ReplicaAddress,
    ReplicaLost,
    ReplicaRefused,
)
from flowstone.limestone.master.ended_session import EndedSession, WireForm
from flowstone.outside import Outside
from flowstone.outside.worker import by_worker

LOG: Final = logging.getLogger("flowstone.limestone")

RETRY_SECONDS: Final = 0.05
RETRY_SECONDS_MAX: Final = 5.0
"""Maximum pause before the next connection attempt. The pause doubles each time, plus up to half of it at random."""

REMIND_SECONDS: Final = 300.0
"""Time after which an unchanged reason for a lost replica is logged again."""

WATCH_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 60.0
"""Time without an acknowledgement after which a Flowstone replica counts as lost; it can reconnect."""

IN_FLIGHT_MAX: Final = 8
"""Maximum number of unacknowledged catch-up sessions, each of about a window."""

IN_FLIGHT_SIZE_MAX: Final = 24 << 20
"""Maximum memory of these sessions in bytes: more than 8 windows. A larger session is sent alone. The value is well
below `UNACKNOWLEDGED_MAX` of `conversation.py`, so that a slow replica does not count as lost while it catches up."""


class LinkState(Enum):
    """The state of the link to one replica."""

    CONNECTING = "connecting"
    CATCHING_UP = "catching up"
    LIVE = "live"
    LOST = "lost"
    GONE = "gone"
    """Lost, and not connected again."""


TRANSITIONS: Final[dict[LinkState, frozenset[LinkState]]] = {
    # A replica of the original's does not catch up. A closed link is gone, whatever its state was.
    LinkState.CONNECTING: frozenset({LinkState.CATCHING_UP, LinkState.LIVE, LinkState.LOST, LinkState.GONE}),
    LinkState.CATCHING_UP: frozenset({LinkState.LIVE, LinkState.LOST, LinkState.GONE}),
    LinkState.LIVE: frozenset({LinkState.LOST, LinkState.GONE}),
    LinkState.LOST: frozenset({LinkState.CONNECTING, LinkState.GONE}),
    LinkState.GONE: frozenset(),
}
"""Maps each state to the states that may follow it."""


@dataclass(frozen=True)
class LinkStatus:
    """The status of one replica. `is_ours`: it can resume and be seeded. `error`: why it is not live."""

    endpoint: str
    state: str
    recorded_epoch: int
    unacknowledged_sessions: int
    is_ours: bool
    was_seeded: bool
    error: str | None


class Circumstances(Protocol):
    """The interface of the owner of all links."""

    channels: list[int]
    """The ids of all log channels."""

    recorded: int
    """The largest epoch that replicas have to record."""

    begun_with: int
    """The epoch that was recorded when the store was opened."""

    has_history: bool
    """True if sessions have ended that a newly connected replica has not received."""

    def recent_sessions(self) -> list[EndedSession]:
        """Return the last session of each channel; callers may be waiting for it."""
        ...

    async def survey(self, files: LogFiles) -> LogSurvey:
        """Return the epochs of valid and of invalidated sessions in these files; computed once."""
        ...

    def without(self, link: ReplicaLink) -> str:
        """Return a text for the operator: the treatment of sessions while this replica is lost."""
        ...

    def changed(self) -> None:
        """Called when a replica has acknowledged something, or a link has changed its state."""
        ...


class ReplicaLink:
    def __init__(
        self,
        outside: Outside,
        peer: ReplicaAddress,
        secret: bytes | None,
        form: WireForm,
        store: CatchUpStore,
        circumstances: Circumstances,
    ) -> None:
        self.state = LinkState.CONNECTING
        self.error: ReplicaLost | None = None
        self.committed = 0
        """The largest epoch that the replica has recorded, as far as we know."""
        self.was_seeded = False
        self.was_tried = False
        """True when the first connection attempt has succeeded or failed."""
        self._outside = outside
        self._peer = peer
        self._secret = secret
        self._form = form
        self._store = store
        self._all = circumstances
        self._conversation: Conversation | None = None
        self._is_ours = False
        self._was_original = False
        self._must_seed = False
        self.takes_commits = True
        """True if the replica records epochs. The original's replica still accepts sessions after it has rejected an
        epoch."""
        self._unacknowledged: dict[EndedSession, float] = {}
        self._committing: tuple[int, float] | None = None
        """The epoch that the replica has been asked to record, and the time of that request."""
        self._next_acknowledged: asyncio.Future[None] | None = None
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None
        self._closing_control: asyncio.Task[None] | None = None
        self._told: tuple[str, float] | None = None
        """The last logged reason of the loss, and the time of that line; None while the link is up."""

    # --- what it is asked ---

    @property
    def is_receiving(self) -> bool:
        """True if sessions that end now are sent to this replica."""
        return self.state in (LinkState.CATCHING_UP, LinkState.LIVE)

    @property
    def is_hopeless(self) -> bool:
        return self.state is LinkState.GONE

    def has(self, session: EndedSession) -> bool:
        return self.state is LinkState.LIVE and self._conversation in session.acknowledged

    def has_committed(self, epoch: int) -> bool:
        return self.state is LinkState.LIVE and self.committed >= epoch

    def status(self) -> LinkStatus:
        return LinkStatus(
            str(self._peer.endpoint),
            self.state.value,
            self.committed,
            len(self._unacknowledged),
            self._is_ours,
            self.was_seeded,
            str(self.error) if self.error is not None and self.state is not LinkState.LIVE else None,
        )

    # --- its life ---

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def close(self) -> None:
        self._is_closed = True
        for task in (self._task, self._closing_control):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self.state = LinkState.GONE
        await self._end_conversation()

    async def connect_channel(self, channel_id: int) -> None:
        """Open a log channel before the control channel, as the original does; raise ReplicaLost if it is rejected."""
        if self._conversation is None:
            self._conversation = Conversation(self._outside, self._peer)
        await self._open_channel(self._conversation, channel_id)
        if self._conversation.lost.done():
            self.error = self._conversation.lost.result()
            self._set_state(LinkState.GONE)
            await self._end_conversation()
            raise self.error

    async def open_channel(self, channel_id: int) -> None:
        """Open the log channel now instead of with its first session, if the replica is ready."""
        if self._conversation is not None and self.is_receiving:
            await self._open_channel(self._conversation, channel_id)

    async def _open_channel(self, conversation: Conversation, channel_id: int) -> None:
        await asyncio.shield(conversation.channel(channel_id).opened)

    async def _live(self) -> None:
        delay = RETRY_SECONDS
        while True:
            error = await self._one_life()
            if self.state is LinkState.LIVE:
                delay = RETRY_SECONDS
            self.error = error
            is_final = error.is_final or self._form.compatible or self._was_original
            self._set_state(LinkState.GONE if is_final else LinkState.LOST)
            await self._end_conversation()
            if is_final or self._is_closed:  # a cancellation may have met an end of another kind
                return
            await self._outside.clock.sleep(delay * self._outside.random.uniform(1.0, 1.5))
            delay = min(2 * delay, RETRY_SECONDS_MAX)
            self._set_state(LinkState.CONNECTING)

    async def _one_life(self) -> ReplicaLost:
        """Run one connection from start to loss; return the reason of the loss."""
        try:
            await self._join()
            return await self._watch()
        except ReplicaLost as error:
            return error
        except (OSError, FlowstoneError) as error:
            # An error of our own files: the replica is not to blame, but it cannot catch up.
            return ReplicaLost(self._peer.endpoint, f"catch-up failed: {error}")
        except Exception as error:
            # A bug of ours. Without a state of loss, callers would wait for this link forever.
            what = f"link to replica {self._peer.endpoint} failed"
            asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})
            return ReplicaLost(self._peer.endpoint, f"{type(error).__name__}: {error}")

    def _set_state(self, state: LinkState) -> None:
        assert state in TRANSITIONS[self.state], f"invalid transition of a link: {self.state.value} to {state.value}"
        self.state = state
        if state is LinkState.LIVE:
            tell = LOG.info if self._told is None else LOG.warning
            tell("replica %s is up to date", self._peer.endpoint)
            self._told = None
        elif state in (LinkState.LOST, LinkState.GONE):
            self._tell_lost()
        if state is not LinkState.CONNECTING:
            self.was_tried = True
        self._all.changed()

    def _tell_lost(self) -> None:
        """Log the reason and its consequence: at once if the reason is new, else at intervals."""
        now, reason = self._outside.clock.monotonic(), str(self.error)
        if self._told is not None and self._told[0] == reason and now < self._told[1] + REMIND_SECONDS:
            return
        self._told = (reason, now)
        LOG.warning("%s; %s", reason, self._all.without(self))

    async def _end_conversation(self) -> None:
        self._unacknowledged.clear()
        self._committing = None
        if self._conversation is not None:
            await self._conversation.close()
            self._conversation = None

    async def _watch(self) -> ReplicaLost:
        """Wait until the replica is lost; return the reason."""
        assert self._conversation is not None
        lost = self._conversation.lost
        while not lost.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await asyncio.shield(lost)
            waited = self._outside.clock.monotonic() - self._oldest_unacknowledged()
            if self._is_ours and waited > SILENCE_SECONDS:
                self._conversation.end(f"no session or epoch acknowledged for {waited:.0f} s")
        return lost.result()

    def _oldest_unacknowledged(self) -> float:
        """Return the time at which the oldest unacknowledged data was sent; the current time if there is none."""
        now = self._outside.clock.monotonic()
        session = next(iter(self._unacknowledged.values()), now)
        return min(session, now if self._committing is None else self._committing[1])

    # --- joining ---

    async def _join(self) -> None:
        """Connect, and bring the replica to the live state."""
        conversation = self._conversation = self._conversation or Conversation(self._outside, self._peer)
        session_secret = await conversation.begin()
        nonce = None if self._form.compatible else extensions.offered_nonce(session_secret)
        self._is_ours = nonce is not None
        if nonce is None:
            await self._join_as_the_original(conversation)
            return
        files = open_files(self._outside.disk, self._store.path, self._store.finished_sizes, self._all.begun_with)
        try:
            ack = await self._greet(conversation, nonce, files.horizon)
            survey = await self._all.survey(files)
            master, epoch = self._store.instance_uuid, self._store.durable_epoch
            prepared = decide(ack, master, epoch, files.horizon, survey)
            if self._must_seed:
                prepared = Prepare(Action.SEED, epoch)
            await self._prepare(conversation, prepared)
        finally:
            files.close()
        self.was_seeded = prepared.action is Action.SEED
        self.committed = 0 if self.was_seeded else prepared.epoch
        await self._catch_up(conversation, prepared)
        self._set_state(LinkState.LIVE)
        self.commit()

    async def _prepare(self, conversation: Conversation, prepared: Prepare) -> None:
        try:
            answer = await conversation.exchange(prepared)
        except ReplicaRefused:
            # The replica cannot return to the epoch of RESUME, so the next attempt seeds it.
            self._must_seed = prepared.action is Action.RESUME
            raise
        if not isinstance(answer, CommonAck):
            raise ReplicaLost(self._peer.endpoint, f"unexpected answer to PREPARE: {type(answer).__name__}")
        self._must_seed = False

    async def _join_as_the_original(self, conversation: Conversation) -> None:
        endpoint = self._peer.endpoint
        if self._secret is not None:
            raise AuthenticationFailed(endpoint, "it did not prove the shared secret")
        if self._all.has_history:
            hint = "restart the master, and the replica on a copy of its directory"
            reason = "missed sessions cannot be sent to an original replica"
            raise ReplicaLost(endpoint, reason, hint=hint, is_final=True)
        for channel_id in self._all.channels:  # in order: the replica numbers its files by it
            await self._open_channel(conversation, channel_id)
        if conversation.lost.done():
            raise conversation.lost.result()
        self._was_original = True
        self.committed = self._all.begun_with
        self._set_state(LinkState.LIVE)
        for session in self._all.recent_sessions():
            self.send(session)
        self.commit()

    async def _greet(self, conversation: Conversation, replica_nonce: bytes, horizon: int) -> HelloAck:
        endpoint, store, secret = self._peer.endpoint, self._store, self._secret
        nonce = self._outside.random.bytes(NONCE_SIZE)
        proof = None if secret is None else extensions.master_proof(secret, nonce, replica_nonce)
        formerly = lineage.read(self._outside.disk, store.path)
        hello = Hello(store.instance_uuid, store.durable_epoch, horizon, nonce, proof, formerly)
        ack = await conversation.exchange(hello)
        if not isinstance(ack, HelloAck):
            raise ReplicaLost(endpoint, f"unexpected answer to HELLO: {type(ack).__name__}")
        if secret is not None and not extensions.is_proven(
            extensions.replica_proof(secret, nonce, replica_nonce), ack.proof
        ):
            raise AuthenticationFailed(endpoint, "it did not prove the shared secret")
        conversation.token = ack.token
        return ack

    async def _catch_up(self, conversation: Conversation, prepared: Prepare) -> None:
        """Send the sessions in the log files. Sessions that end from now on are sent when they end."""
        self._set_state(LinkState.CATCHING_UP)
        for channel_id in self._all.channels:
            conversation.channel(channel_id)
        conversation.lost.add_done_callback(lambda _: self._wake())
        recent = self._all.recent_sessions()
        files = open_files(self._outside.disk, self._store.path, self._store.finished_sizes, self._all.begun_with)
        try:
            if prepared.action is Action.RESUME and files.horizon > prepared.epoch:
                raise ReplicaLost(
                    self._peer.endpoint, "sessions that the replica lacks were compacted while it prepared"
                )
            await self._send_files(conversation, files.sessions(prepared))
        finally:
            files.close()
        for channel_id in self._all.channels:  # a replica that refuses a channel would be lost as soon as it is live
            await self._open_channel(conversation, channel_id)
        if conversation.lost.done():
            raise conversation.lost.result()
        for session in recent:
            session.acknowledged.append(conversation)

    async def _send_files(self, conversation: Conversation, sessions: Iterator[tuple[int, bytes]]) -> None:
        form = replace(self._form, is_old=True)
        in_flight: dict[EndedSession, int] = {}

        def next_session() -> tuple[EndedSession, int] | None:
            found = next(sessions, None)
            if found is None:
                return None
            epoch, data = found
            session = EndedSession(form, SEED_CHANNEL_MAX, epoch, lambda: (data,))
            return session, max(session.held, len(data))  # a session that is too long to keep still holds its entries

        while (found := await by_worker(self._outside, next_session)) is not None:
            session, size = found
            while not self._has_room(in_flight, size):
                await self._acknowledged(conversation)
            in_flight[session] = size
            self.send(session)
        while self._unacknowledged.keys() & in_flight.keys():
            await self._acknowledged(conversation)
        if SEED_CHANNEL_MAX not in self._all.channels:
            await conversation.close_channel(SEED_CHANNEL_MAX)

    def _has_room(self, in_flight: dict[EndedSession, int], size: int) -> bool:
        """Drop acknowledged sessions; return True if a session of this size may be sent besides the others."""
        for session in [*in_flight]:
            if session not in self._unacknowledged:
                del in_flight[session]
        is_small = size + sum(in_flight.values()) <= IN_FLIGHT_SIZE_MAX
        return not in_flight or (is_small and len(in_flight) < IN_FLIGHT_MAX)

    async def _acknowledged(self, conversation: Conversation) -> None:
        """Wait until one more session is acknowledged."""
        self._next_acknowledged = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                if not conversation.lost.done():
                    await self._next_acknowledged
        except TimeoutError:
            conversation.end(f"no session acknowledged for {SILENCE_SECONDS:.0f} s")
        if conversation.lost.done():
            raise conversation.lost.result()

    def _wake(self) -> None:
        if self._next_acknowledged is not None and not self._next_acknowledged.done():
            self._next_acknowledged.set_result(None)

    # --- running ---

    def send(self, session: EndedSession) -> None:
        """Send a session if the replica is connected."""
        conversation = self._conversation
        if conversation is None or not self.is_receiving or session in self._unacknowledged:
            return
        self._unacknowledged[session] = self._outside.clock.monotonic()
        conversation.channel(session.channel_id).send(session, lambda: self._has_acknowledged(session))

    def _has_acknowledged(self, session: EndedSession) -> None:
        self._unacknowledged.pop(session, None)
        self._wake()
        self.commit()
        self._all.changed()

    def commit(self) -> None:
        """Ask the replica to record the epoch, once it has all sessions of this and of earlier epochs."""
        epoch, conversation = self._all.recorded, self._conversation
        if conversation is None or self.state is not LinkState.LIVE or not self.takes_commits:
            return
        if self._committing is not None or epoch <= self.committed:
            return
        if any(session.epoch <= epoch for session in self._unacknowledged):
            return
        self._committing = (epoch, self._outside.clock.monotonic())

        def recorded() -> None:
            self._committing = None
            self.committed = epoch
            self.commit()
            self._all.changed()

        conversation.group_commit(epoch, recorded, self._commit_refused)

    def _commit_refused(self, answer: Answer) -> None:
        conversation = self._conversation
        if conversation is None:
            return
        if not self._form.compatible:
            conversation.refused("GROUP_COMMIT", answer)
            return
        # As the original: no control channel any more, but sessions go on.
        self.takes_commits = False
        self._closing_control = asyncio.get_running_loop().create_task(conversation.close_control())
        self._all.changed()
