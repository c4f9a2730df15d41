"""Packaging: the README of a wheel or sdist, whose links lead to the repository because a package index has no other files."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^]]*)\]\((?!https?://|#)([^)\s]+)\)")


def absolute(readme: str, repository: str, version: str) -> str:
    """`readme` with its relative links and pictures replaced by addresses in `repository` at the tag of `version`."""

    def replace(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return LINK.sub(replace, readme)


class ReadmeHook(MetadataHookInterface):
    """Fills the field `readme` of the metadata."""

    def update(self, metadata: dict) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(readme, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
