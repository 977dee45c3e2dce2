"""TLS: the server presents a certificate, and may require one from its clients.

Without TLS data is sent in the clear, which suits one host or a private network. Certificates come from the operator of
the cluster; for a single run one self-signed certificate that all processes share is enough (`cert` and `key`, no `ca`;
docs/concepts/weight-transport.md shows the command).
"""

import functools
import ssl
from pathlib import Path
from typing import override

from axlearn_like.config import ConfigBase, Configurable
from mesh import UserError


class Tls(Configurable):
    """TLS contexts from files. TLS 1.3 or later on both sides."""

    class Config(ConfigBase["Tls"]):
        cert: str = ""  # PEM: our certificate, and those between it and the authority
        key: str = ""  # PEM: its private key; empty: in `cert` too
        ca: str = ""  # PEM: who signs the certificates that we accept; empty: only `cert` itself
        verify_clients: bool = False  # a server lets in only clients with such a certificate (and the token)
        check_host: bool = True  # a client asks that the certificate be for the host it connects to

        @override
        def check_fields(self) -> None:
            self.require("cert", bool(self.cert or self.ca), "a file, or ca (of a client without a certificate)")
            for field in ("cert", "key", "ca"):
                path = getattr(self, field)
                self.require(field, not path or Path(path).is_file(), "a file that exists")

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @property
    def authority(self) -> str:
        """Return the file with which both sides verify each other."""
        return self.cfg.ca or self.cfg.cert

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        """Return the SSL context of a server. Raises UserError."""
        if not self.cfg.cert:
            raise UserError("tls.cert is empty: a server has to show a certificate")
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        self._show_certificate(context)
        if self.cfg.verify_clients:
            context.verify_mode = ssl.CERT_REQUIRED
            _trust(context, self.authority)
        return context

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        """Return the SSL context of a client. Raises UserError."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.cfg.check_host
        _trust(context, self.authority)
        if self.cfg.cert:
            self._show_certificate(context)
        return context

    def _show_certificate(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.cfg.cert, self.cfg.key or None)
        except (ssl.SSLError, OSError) as error:
            where = f"tls.cert={self.cfg.cert}, tls.key={self.cfg.key or '(in tls.cert)'}"
            raise UserError(f"{where}: not a certificate and its private key in PEM form: {error}") from error


def reason_of(error: ssl.SSLError | OSError) -> str:
    """Describe why a TLS handshake failed, and which setting to check."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message or error} (tls.ca, tls.check_host)"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return "no answer to the TLS handshake"
    return error.strerror or str(error)


def _context(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_ENABLE_KTLS  # the kernel encrypts, where it and OpenSSL can
    return context


def _trust(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise UserError(f"tls.ca={path}: no certificates in PEM form: {error}") from error
