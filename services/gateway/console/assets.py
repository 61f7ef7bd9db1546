"""The files of the console page, read and compressed once, and the headers under which a browser runs them."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from pagewire.services.gateway.console import fields

PAGE = "/"
"""Path of the page."""
FOLDER = "/console/"
"""Path of the other files."""
MARK = "<!-- modules -->"
"""Place in the page for links to all modules, so that a browser loads them at once and not one after the other."""
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Content-Security-Policy: nothing of another server, no inline code, no text that becomes code or markup."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}

_PAGE_FOLDER = Path(__file__).parent / "page"


@dataclass(frozen=True, slots=True)
class Asset:
    """One file."""

    media_type: str
    content: bytes
    compressed: bytes
    """The content, compressed with gzip."""
    tag: str
    """ETag, which changes with the content."""

    def answer(self, request: Request) -> Response:
        """Returns the file, or 304 if the browser has it."""
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(None, 304, headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, 200, {**headers, "Content-Encoding": "gzip"}, self.media_type)
        return Response(self.content, 200, headers, self.media_type)


def load() -> Mapping[str, Asset]:
    """Returns the files by their paths."""
    sources = sorted(_PAGE_FOLDER.rglob("*.*"))
    modules = [
        f'<link rel="modulepreload" href="{_path_of(path)}">'
        for path in sources
        if path.suffix == ".js" and path.parent != _PAGE_FOLDER
    ]
    page = (_PAGE_FOLDER / "index.html").read_text().replace(MARK, "\n".join(modules))
    assets = {_path_of(path): _asset(path.read_bytes(), path.suffix) for path in sources}
    assets[PAGE] = _asset(page.encode(), ".html")
    assets[f"{FOLDER}fields.json"] = _asset(fields.encoded(), ".json")
    return assets


def _path_of(path: Path) -> str:
    name = path.relative_to(_PAGE_FOLDER).as_posix()
    return PAGE if name == "index.html" else FOLDER + name


def _asset(content: bytes, suffix: str) -> Asset:
    tag = f'"{sha256(content).hexdigest()[:16]}"'
    return Asset(MEDIA_TYPES[suffix], content, gzip.compress(content, 9, mtime=0), tag)
