"""What the site does to the pages: links that leave docs/ go to the repository, and two pages of the root join the site."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
JOINING = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
WIDE = {"comparison.md", "claims.md", "s-table-3.md"}  # pages of wide tables, which take the place of the contents
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def repository_url(config: Any, path: str) -> str:
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config['repo_url']}/{kind}/main/{path}"


def relinked(text: str, folder: str, here: str, config: Any) -> str:
    """The text of a page with links that work on the site.

    Args:
        folder: the folder of the text, relative to the root of the repository, which its links start from.
        here: the folder of the page on the site.
    """

    def link(match: re.Match[str]) -> str:
        path, anchor = posixpath.normpath(posixpath.join(folder, match[2])), match[3] or ""
        if path in JOINING:
            path = f"docs/{JOINING[path]}"
        elif path == "README.md":
            path = "docs/index.md"
        elif not path.startswith("docs/") or path.endswith((".py", ".json")):
            return f"{match[1]}{repository_url(config, path)}{anchor})"
        return f"{match[1]}{posixpath.relpath(path, posixpath.join('docs', here))}{anchor})"

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in FENCE.split(text))


def on_config(config: Any) -> Any:
    from pymdownx.slugs import slugify

    config["mdx_configs"]["toc"]["slugify"] = slugify(case="lower")  # anchors as on GitHub, where the pages are read too
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in JOINING.items():
        text = relinked((ROOT / source).read_text(encoding="utf-8"), "", "", config)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in JOINING.values():
        return markdown
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    here = posixpath.dirname(page.file.src_uri)
    return relinked(markdown, posixpath.join("docs", here), here or ".", config)
