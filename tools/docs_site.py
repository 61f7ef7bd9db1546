"""A hook of mkdocs: files outside `docs/` that its pages link to become part of the site."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINKED = ("CONTRIBUTING.md", "CHANGELOG.md", "bench/results/*", "examples/*.py")
"""Patterns of the files outside `docs/` that the site has."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the linked files under their paths in the checkout."""
    for pattern in LINKED:
        for path in ROOT.glob(pattern):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Returns a page whose links out of `docs/` lead to files of the site, whose root has the pages."""
    return markdown.replace("](../", "](")
