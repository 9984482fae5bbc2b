"""TLS between ends that know the same token: it makes the one key and certificate that both show and accept.

TLS 1.3. The token itself never travels, and nobody without it gets past the handshake.
"""

import datetime
import hashlib
import secrets
import ssl
import tempfile
from pathlib import Path

TOKEN_BYTES = 32
# Nobody checks the dates, but both ends must make the same certificate.
BEGIN, END = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)


def new_token() -> bytes:
    """A token that nobody can guess, as text that fits a line."""
    return secrets.token_hex(TOKEN_BYTES).encode()


def contexts(token: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of the end that listens and of the end that dials."""
    key, certificate = _identity(token)
    server, client = (ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    client.check_hostname = False
    # Each connection shows the key: none resumes a session.
    server.num_tickets = 0
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        # OpenSSL reads them from files only; others cannot read this folder.
        path = Path(folder) / "identity.pem"
        path.write_bytes(key + certificate)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(path)
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
    """The key and the certificate, both as PEM: the same wherever they are made of the same token."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"pipeline 3 " + token).digest())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pipeline")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(BEGIN)
        .not_valid_after(END)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret, certificate.public_bytes(pem)
