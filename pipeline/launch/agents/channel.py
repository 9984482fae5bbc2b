"""One end of a channel between driver and agent, whose numbered messages outlast the connections they travel over.

Each end keeps its messages until the other is done with them, and the next connection goes on from there: nothing is
lost, and nothing comes twice. All is encrypted by TLS 1.3 between ends that know the same token, which itself never
travels: it makes the one key and certificate that both show and accept. Nobody without it gets past the handshake.
"""

import asyncio
import datetime
import hashlib
import secrets
import ssl
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pipeline.config.parts import typed

if TYPE_CHECKING:
    from pipeline.launch.agents.endpoint import Endpoint

# Of a frame: bytes of its data, the message's number, and up to which message this end is done with the other's. A
# frame without a number is a greeting, or a sign of life where it has no data.
HEADER = struct.Struct("!IQQ")
# No message is longer: a plan for the most workers is some megabytes.
MOST_BYTES = 1 << 28
# Kept for the other end before this one is to wait, and for this one before the other is read no more.
WINDOW_BYTES = 32 << 20
# A connection that has nothing to send gives a sign of life so often.
WORD_SECONDS = 2.0
TOKEN_BYTES = 32
# Nobody checks the dates, but both ends must make the same certificate.
BEGIN, END = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)
REPLACED, OCCUPIED = "another has taken its place", "another of its name is there"


class Greeting(msgspec.Struct, frozen=True):
    """The first frame of each end: its name, its log's id, and the last message of the `peer` log that it is done with.

    `adopts`: this driver goes on with the processes of another. `dial`: HOST:PORT at which the end that has dialled
    wants to be dialled from now on. `refuses`: why the other end is turned away.
    """

    name: str
    life: str
    peer: str = ""
    done: int = 0
    adopts: bool = False
    dial: str = ""
    refuses: str = ""


@dataclass(frozen=True)
class Received:
    """A message that has come, its number, and the id of the log that it is from."""

    number: int
    data: bytes
    life: str


class Channel:
    """One end of a channel, to the end of a name. Any thread may use it."""

    def __init__(self, endpoint: "Endpoint", name: str) -> None:
        self.name, self.endpoint, self._lock = name, endpoint, endpoint.lock
        self.connection: Connection | None = None
        # The id of the other end's log, whether it goes on with another driver's processes, and the logs before it.
        self.life, self.adopts, self.past = "", False, set[str]()
        # On the monotonic clock, since when there is no connection; why; and whether nothing listens there any more.
        self.away_since: float | None = time.monotonic()
        self.problem, self.nobody = "", False
        # This end's messages that the other is not done with, by number, and the last that was sent.
        self.kept, self.kept_bytes, self.sent = dict[int, bytes](), 0, 0
        # The other end's messages: the last that has come, those to be taken, and, in order, the numbers of those that
        # this end is not done with.
        self.came, self.inbox, self.inbox_bytes, self.open = 0, list[Received](), 0, dict[int, None]()
        # Is another in the place of this end?
        self.refused = False

    @property
    def away(self) -> float:
        """Seconds without a connection; 0 with one."""
        since = self.away_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def has_room(self) -> bool:
        """True while little enough is kept for the other end that more may be sent."""
        return self.kept_bytes < WINDOW_BYTES

    @property
    def done_with(self) -> int:
        """The last of the other end's messages before which this end is done with all."""
        return next(iter(self.open), self.came + 1) - 1

    def send(self, data: bytes) -> None:
        """Sends a message, now or once there is a connection again."""
        with self._lock:
            self.sent += 1
            self.kept[self.sent] = data
            self.kept_bytes += len(data)
            self.endpoint.wake(self)

    def take(self) -> list[Received]:
        """Returns what has come, in order, each message once."""
        with self._lock:
            messages, self.inbox = self.inbox, []
            was_full, self.inbox_bytes = self.inbox_bytes >= WINDOW_BYTES, 0
            if was_full:
                self.endpoint.wake(self)
        return messages

    def done(self, received: Received) -> None:
        """Lets the other end forget a message, once those before it are done with as well."""
        with self._lock:
            if received.life == self.life:
                self.open.pop(received.number, None)

    def greeted(self, greeting: Greeting, connection: "Connection") -> None:
        """Takes another connection to the other end, from where that is. Under the lock."""
        if greeting.life != self.life:
            # What was meant for the process before means nothing to this one, unless it goes on with that one's work.
            if self.life and not greeting.adopts:
                self.drop(self.sent)
            self.past.add(self.life)
            self.life, self.adopts = greeting.life, greeting.adopts
            self.came, self.inbox, self.inbox_bytes, self.open = 0, [], 0, {}
        if greeting.peer == self.endpoint.life:
            self.drop(greeting.done)
        connection.next = min(self.kept, default=self.sent + 1)
        connection.said_done = self.done_with
        self.connection, self.away_since, self.problem, self.nobody = connection, None, "", False

    def drop(self, done: int) -> None:
        """Forgets what the other end is done with. Under the lock."""
        for number in [number for number in self.kept if number <= done]:
            self.kept_bytes -= len(self.kept.pop(number))


class Connection(asyncio.Protocol):
    """One connection of a channel; `channel` is None until the end that has dialled has greeted."""

    transport: asyncio.Transport

    def __init__(self, endpoint: "Endpoint", channel: Channel | None = None) -> None:
        self._endpoint, self.channel, self._dialled = endpoint, channel, channel is not None
        self._greeted = self._full = self.paused = False
        # The next message to be written; what the other end knows that this one is done with.
        self.next, self.said_done = 1, 0
        self.heard = self._spoke = time.monotonic()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greets, where this end has dialled: it is encrypted, and its other end has shown the token."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._endpoint.connections.add(self)
        if self.channel is not None:
            with self._endpoint.lock:
                self._greet(self.channel)

    def data_received(self, data: bytes) -> None:
        """Takes in the frames that are whole."""
        self.heard = time.monotonic()
        self._unread += data
        while len(self._unread) >= HEADER.size and not self.over.done():
            size, number, done = HEADER.unpack_from(self._unread)
            end = HEADER.size + size
            if size > MOST_BYTES:
                self.lost("it sends too long a message")
            if len(self._unread) < end:
                break
            frame = bytes(self._unread[HEADER.size : end])
            del self._unread[:end]
            with self._endpoint.lock:
                if not self._greeted:
                    self._meet(frame)
                elif (channel := self.channel) is not None and self is channel.connection:
                    channel.drop(done)
                    # It may have come before.
                    if frame and number > channel.came:
                        channel.came, channel.open[number] = number, None
                        channel.inbox.append(Received(number, frame, channel.life))
                        channel.inbox_bytes += len(frame)
                        self._endpoint.tell()
                    self._pause(channel)

    def pause_writing(self) -> None:
        """Notes that enough waits to be sent."""
        self._full = True

    def resume_writing(self) -> None:
        """Writes on."""
        self._full = False
        self.write()

    def connection_lost(self, error: Exception | None) -> None:
        """Notes why it has ended."""
        self.lost("it hung up" if error is None else why_refused(error))

    def write(self) -> None:
        """Writes what waits, as far as there is room."""
        with self._endpoint.lock:
            channel = self.channel
            if channel is None or self is not channel.connection:
                return
            while not self._full and self.next in channel.kept:
                self._put(self.next, channel.done_with, channel.kept[self.next])
                self.next += 1
            late = time.monotonic() - self._spoke > WORD_SECONDS
            if not self._full and (late or channel.done_with > self.said_done):
                self._put(0, channel.done_with, b"")
            self._pause(channel)

    def lost(self, why: str) -> None:
        """Gives the connection up."""
        if self.over.done():
            return
        self.over.set_result(None)
        self._endpoint.connections.discard(self)
        self.transport.abort()
        with self._endpoint.lock:
            channel = self.channel
            if channel is not None and channel.connection is self:
                channel.connection, channel.away_since = None, self.heard
            if channel is not None and channel.connection is None:
                channel.problem = channel.problem if self._dialled and not self._greeted else why
                self._endpoint.tell()

    def _put(self, number: int, done: int, data: bytes) -> None:
        self.transport.write(HEADER.pack(len(data), number, done) + data)
        self.said_done, self._spoke = done, time.monotonic()

    def _greet(self, channel: Channel, refuses: str = "") -> None:
        end, at = self._endpoint, self._endpoint.at if self._dialled else ""
        greeting = Greeting(end.name, end.life, channel.life, channel.done_with, end.adopts, at, refuses)
        self._put(0, channel.done_with, msgspec.json.encode(greeting))

    def _meet(self, data: bytes) -> None:
        try:
            theirs = typed(msgspec.json.decode(data), Greeting)
        except msgspec.MsgspecError as error:
            self.lost(f"it has another version: {error}")
            return
        channel = self.channel = self.channel or self._endpoint.channel(theirs.name)
        occupied = channel.connection is not None and theirs.life != channel.life
        refuses = REPLACED if theirs.life in channel.past else OCCUPIED if occupied else ""
        if not self._dialled:
            self._greet(channel, refuses)
        channel.refused = channel.refused or theirs.refuses == REPLACED
        if theirs.refuses or refuses:
            channel.problem = theirs.refuses or channel.problem
            # What was written, as why, is sent before.
            self.transport.close()
            return
        if channel.connection is not None:
            channel.connection.lost("another connection has taken its place")
        self._greeted = True
        channel.greeted(theirs, self)
        if theirs.dial:
            self._endpoint.dial(channel.name, theirs.dial, after=self)
        self._endpoint.tell()
        self.write()

    def _pause(self, channel: Channel) -> None:
        full = channel.inbox_bytes >= WINDOW_BYTES
        if full and not self.paused:
            self.transport.pause_reading()
        elif self.paused and not full:
            self.heard = time.monotonic()
            self.transport.resume_reading()
        self.paused = full


def new_token() -> bytes:
    """A token that nobody can guess, as text that fits a line."""
    return secrets.token_hex(TOKEN_BYTES).encode()


def contexts(token: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of the end that listens and of the end that dials."""
    identity, certificate = _identity(token)
    server, client = (ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    client.check_hostname = False
    # Each connection shows the key: none resumes a session.
    server.num_tickets = 0
    # OpenSSL reads a key from files only; others cannot read this one.
    with tempfile.NamedTemporaryFile(prefix="pipeline-") as file:
        file.write(identity)
        file.flush()
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(file.name)
            context.load_verify_locations(cadata=certificate.decode())
    return server, client


def why_refused(error: BaseException) -> str:
    """Says what is wrong with the other end of a connection."""
    text = str(error)
    if isinstance(error, ssl.SSLCertVerificationError) or "UNKNOWN_CA" in text or "DECRYPT_ERROR" in text:
        return "it has another token"
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in text or "CERTIFICATE_REQUIRED" in text:
        return "it shows no token"
    if isinstance(error, ssl.SSLError):
        return "it does not speak TLS 1.3"
    if isinstance(error, TimeoutError) or "taking longer" in text:
        return "it said nothing of use in time"
    return text or "it hung up"


def _identity(token: bytes) -> tuple[bytes, bytes]:
    """(Key and certificate, certificate) as PEM: the same wherever they are made of the same token."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"pipeline 3 " + token).digest())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pipeline")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    pem = serialization.Encoding.PEM
    signed = builder.serial_number(1).not_valid_before(BEGIN).not_valid_after(END).sign(key, None).public_bytes(pem)
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()) + signed, signed
