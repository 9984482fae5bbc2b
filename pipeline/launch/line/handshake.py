"""Turns a connection into one that is encrypted, and whose other end has shown that it knows the run's token.

TLS 1.3 under a certificate that is made for the run and that nobody has signed. So each end shows the token, which
never travels, by an HMAC over which end it is, what both have drawn, and the certificate that it sees: who stands
between the two, under another certificate, cannot pass it on. Until then nothing is read but some hundred bytes, for
some seconds.
"""

import datetime
import hashlib
import hmac
import secrets
import socket
import ssl
import tempfile
import time
from functools import cache
from pathlib import Path

# What a connection begins with, once it is encrypted.
MAGIC = b"pipeline 2"
HANDSHAKE_SECONDS = 5.0
NONCE_BYTES, PROOF_BYTES, TOKEN_BYTES = 32, 32, 32
# What each end shows is of no use as the other's.
DIALS, LISTENS = b"dials", b"listens"


class RefusedError(OSError):
    """A connection that is not one of ours: the message says what came instead."""


class Identity:
    """What the end that listens shows: a key and a certificate, made anew for each process."""

    def __init__(self) -> None:
        key, certificate, self.fingerprint = _made()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Nobody resumes a session: each connection shows the token.
        self.context.num_tickets = 0
        with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
            # OpenSSL reads them from files only; others cannot read this folder.
            path = Path(folder) / "identity.pem"
            path.touch(0o600)
            path.write_bytes(key + certificate)
            self.context.load_cert_chain(path)


def new_token() -> bytes:
    """A token that nobody can guess, as text that fits a line."""
    return secrets.token_hex(TOKEN_BYTES).encode()


def greet_dialler(connected: socket.socket, identity: Identity, token: bytes) -> ssl.SSLSocket:
    """The encrypted connection of who has dialled this end. Raises `RefusedError`, and hangs up."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    made: socket.socket = connected
    try:
        connected.settimeout(HANDSHAKE_SECONDS)
        made = encrypted = identity.context.wrap_socket(connected, server_side=True)
        if _exactly(encrypted, len(MAGIC), deadline) != MAGIC:
            raise RefusedError("it spoke of something else")
        theirs, mine = _exactly(encrypted, NONCE_BYTES, deadline), secrets.token_bytes(NONCE_BYTES)
        encrypted.sendall(mine)
        said = theirs + mine + identity.fingerprint
        if not hmac.compare_digest(_exactly(encrypted, PROOF_BYTES, deadline), _proof(token, DIALS, said)):
            raise RefusedError("it has another token")
        encrypted.sendall(_proof(token, LISTENS, said))
        return encrypted
    except (OSError, ValueError) as error:
        made.close()
        raise _refused(error) from error


def dial(address: str, token: bytes, seconds: float = HANDSHAKE_SECONDS) -> ssl.SSLSocket:
    """An encrypted connection to who listens at HOST:PORT. Raises `RefusedError`, or `OSError` where nobody does."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    made: socket.socket = socket.create_connection((host, int(port)), seconds)
    try:
        made.settimeout(max(0.001, deadline - time.monotonic()))
        made = encrypted = _dialling().wrap_socket(made)
        mine = secrets.token_bytes(NONCE_BYTES)
        encrypted.sendall(MAGIC + mine)
        theirs = _exactly(encrypted, NONCE_BYTES, deadline)
        shown = hashlib.sha256(encrypted.getpeercert(binary_form=True) or b"").digest()
        encrypted.sendall(_proof(token, DIALS, mine + theirs + shown))
        if not hmac.compare_digest(
            _exactly(encrypted, PROOF_BYTES, deadline), _proof(token, LISTENS, mine + theirs + shown)
        ):
            raise RefusedError("it has another token")
        return encrypted
    except (OSError, ValueError) as error:
        made.close()
        raise _refused(error) from error


@cache
def _dialling() -> ssl.SSLContext:
    """Whoever answers is believed only once it has shown the token over the certificate that it came with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _proof(token: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(token, role + said, hashlib.sha256)


def _exactly(connected: ssl.SSLSocket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connected.settimeout(max(0.001, deadline - time.monotonic()))
        more = connected.recv(count - len(data))
        if not more:
            raise RefusedError("it hung up")
        data += more
    return data


def _refused(error: Exception) -> RefusedError:
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, TimeoutError):
        return RefusedError(f"it said nothing of use within {HANDSHAKE_SECONDS:g} s")
    if isinstance(error, ssl.SSLError):
        return RefusedError("it does not speak TLS 1.3")
    return RefusedError(str(error) or type(error).__name__)


def _made() -> tuple[bytes, bytes, bytes]:
    """(key, certificate, both as PEM; the certificate's SHA-256)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pipeline")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks may be apart, and nobody checks the dates.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    der = certificate.public_bytes(serialization.Encoding.DER)
    return secret, certificate.public_bytes(pem), hashlib.sha256(der).digest()
