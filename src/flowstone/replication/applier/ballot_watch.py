"""Ballots of an upstream: the answer to VOTE, or, from newer servers, an event on a connection of its own.

Pure: bytes go in, ballots come out. See docs/spec/replication.md#ballot.
"""

from __future__ import annotations

from typing import Final

from flowstone.errors import FlowstoneError, RemoteProtocolError
from flowstone.iproto import errors
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.greeting import GREETING_SIZE, Greeting, decode_greeting
from flowstone.iproto.msgpack import pack
from flowstone.iproto.packet import Response, decode_response, frame
from flowstone.iproto.requests import split_map
from flowstone.iproto.row import Row, encode_header
from flowstone.replication import messages
from flowstone.replication.messages import Ballot
from flowstone.replication.row_stream import REPLY_SIZE_MAX, RowStream


def decode_vote(response: Response, greeting: Greeting) -> Ballot | None:
    """Return the ballot in the reply to VOTE; None if the server does not support VOTE. Raise any other error of the
    peer."""
    if response.is_error:
        error = response.error()
        if not isinstance(error, errors.UnknownRequestType):
            raise error
        return None
    return messages.decode_ballot(response.body, is_2_6=greeting.version < (2, 6, 1))


class BallotWatch:
    """A second connection to a newer upstream, which sends its ballot whenever the ballot changes.

    It watches the event `internal.ballot`. If the event has no value, the server supports watchers but not this event,
    and the ballot is requested once with VOTE.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._stream = RowStream(peer, packet_size_max=REPLY_SIZE_MAX)
        self._greeting_bytes = b""
        self._greeting: Greeting | None = None
        self._outgoing: list[bytes] = []
        self._is_vote = False
        self._ballot = Ballot(is_booted=False)

    def receive(self, data: bytes) -> None:
        if self._greeting is None:
            self._greeting_bytes += data
            if len(self._greeting_bytes) < GREETING_SIZE:
                return
            self._greeting = decode_greeting(self._greeting_bytes[:GREETING_SIZE])
            data = self._greeting_bytes[GREETING_SIZE:]
            self._outgoing.append(_WATCH)
        if data:
            self._stream.feed(data)

    def data_to_send(self) -> bytes:
        data, self._outgoing = b"".join(self._outgoing), []
        return data

    def next_ballot(self) -> Ballot | None:
        """Return the next ballot; None until more bytes arrive.

        Ballots of a peer that is still starting are skipped. Raise the errors that the peer sends, and
        RemoteProtocolError for a ballot that cannot be decoded; no other exception is raised.
        """
        while (packet := self._stream.take_packet()) is not None:
            ballot = self._read(packet)
            if ballot is None:
                continue
            self._ballot = ballot
            if ballot.is_booted or ballot.is_ro:  # a ballot with neither is a placeholder
                return ballot
        return None

    def _read(self, packet: bytes) -> Ballot | None:
        try:
            response = decode_response(packet)
            return self._voted(response) if self._is_vote else self._told(response)
        except FlowstoneError:
            raise
        except Exception as error:
            raise RemoteProtocolError(f"cannot decode the ballot of {self._peer}: {error}") from error

    def _voted(self, response: Response) -> Ballot:
        assert self._greeting is not None
        return decode_vote(response, self._greeting) or Ballot()

    def _told(self, response: Response) -> Ballot | None:
        if response.is_error:
            raise response.error()
        if response.type != RequestType.EVENT:
            raise errors.UnknownRequestType(f"Unknown request type {response.type}")
        data = split_map(response.body).get(Key.EVENT_DATA)
        if data is None:  # the server supports watchers, but not this event
            self._is_vote = True
            self._outgoing.append(messages.encode_vote())
            return None
        # Acknowledges the event: the server sends the next one only after that
        # (docs/spec/replication.md#connection-sequence).
        self._outgoing.append(_WATCH)
        return messages.decode_ballot_event(data, self._ballot)


_WATCH: Final = frame(encode_header(Row(RequestType.WATCH.value)) + pack({Key.EVENT_KEY.value: "internal.ballot"}))
"""Requests the ballot; sent again after each event, it requests the next one."""
