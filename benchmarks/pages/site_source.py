"""Write the source of the documentation site: the pages of docs/ and what is generated from code and records.

python benchmarks/pages/site_source.py build/site-source

`make docs-site` runs this and then Sphinx. Links between pages are written as they work in the repository, and are
changed here to where the pages are on the site. The navigation follows the sections of docs/index.md.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import api_pages
import method_pages
import notebooks
from page_helpers import DOCS, ROOT

EXAMPLES = ROOT / "examples"
# Pages outside docs/: the path in the repository, and the page on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples/index.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^ *```.*?^ *```$", re.S | re.M)
UNLISTED = "More"  # the section of pages that docs/index.md does not list


def find_pages() -> dict[str, str]:
    """Return the files of the repository that are on the site: their paths there, by their paths here."""
    docs = {path.relative_to(ROOT).as_posix(): path.relative_to(DOCS).as_posix() for path in files_below(DOCS)}
    scripts = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in find_scripts()}
    same_as_pages = {f"examples/{notebook}.ipynb": f"{page}.md" for notebook, page in notebooks.PAGES.items()}
    return docs | OUTSIDE | scripts | same_as_pages


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the pages and pictures below a folder."""
    return (path for path in sorted(folder.rglob("*")) if path.suffix in (".md", ".svg", ".png"))


def find_scripts() -> list[Path]:
    """Return the scripts of examples/."""
    return sorted(EXAMPLES.glob("*.py"))


def move_links(text: str, source: str, pages: Mapping[str, str]) -> str:
    """Return a page with its links as they are on the site.

    `source` is the page's path in the repository. A link to a file that is not on the site becomes plain text. Code
    blocks are not changed.
    """
    kept: list[str] = []

    def set_aside(block: re.Match[str]) -> str:
        kept.append(block[0])
        return f"\0{len(kept) - 1}\0"

    def move(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if target not in pages:
            return link[0]
        return posixpath.relpath(pages[target], posixpath.dirname(pages[source]) or ".") + (link[2] or "")

    def unlink(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        return link[1] if target not in pages and (ROOT / target).exists() else link[0]

    text = FENCE.sub(set_aside, text)
    text = re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(?:#[^)\s]*)?\)", unlink, text)
    return re.sub("\0(\\d+)\0", lambda mark: kept[int(mark[1])], LINK.sub(move, text))


def read_sections(index: str) -> dict[str, list[str]]:
    """Return the pages that each section of docs/index.md lists."""
    sections = re.split(r"^## (.+)\n", index, flags=re.M)[1:]
    return {
        title: [link[0] for link in LINK.findall(text) if link[0].endswith(".md")]
        for title, text in zip(sections[::2], sections[1::2], strict=True)
    }


def add_navigation(index: str, all_pages: Sequence[str]) -> str:
    """Return docs/index.md with a table of contents for each of its sections, which only the navigation shows."""
    sections = read_sections(index)
    listed = {page for pages in sections.values() for page in pages} | {"index.md"}
    sections = {"": ["self"], **sections}
    if unlisted := [page for page in all_pages if page not in listed]:
        sections[UNLISTED] = unlisted
    sections["Reference"] = ["api/index"]
    return index + "".join(format_toctree(pages, title) for title, pages in sections.items())


def format_toctree(pages: Sequence[str], caption: str = "") -> str:
    """Return a hidden table of contents."""
    title = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{title}\n" + "\n".join(pages) + "\n```\n"


def render_script(path: Path) -> str:
    """Return the page of a script."""
    return f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"


def render_source() -> dict[str, str]:
    """Return the pages of the site by their paths, without pictures."""
    pages = find_pages()
    methods, api = method_pages.render_pages(), api_pages.render_pages()
    rendered = {f"methods/{name}.md": text for name, text in methods.items()}
    rendered |= {f"api/{name}": text for name, text in api.items()}
    rendered |= {pages[f"examples/{path.name}"]: render_script(path) for path in find_scripts()}
    for source, page in pages.items():
        if source.endswith(".md") and source != "README.md" and (ROOT / source).is_file():
            rendered[page] = move_links((ROOT / source).read_text(encoding="utf-8"), source, pages)
    written = [page for page in rendered if page.endswith(".md") and "/" not in page]
    rendered["index.md"] = add_navigation(rendered["index.md"], written)
    rendered["methods.md"] += format_toctree([f"methods/{name}" for name in methods])
    rendered["examples/index.md"] += format_toctree([path.stem for path in find_scripts()])
    return rendered


def write_source(folder: Path) -> None:
    """Write the pages and pictures to a folder, and remove others from it. Unchanged files keep their times."""
    rendered = {path: text.encode() for path, text in render_source().items()}
    pictures = (path for path in files_below(DOCS) if path.suffix != ".md")
    rendered |= {path.relative_to(DOCS).as_posix(): path.read_bytes() for path in pictures}
    for old in [path for path in folder.rglob("*") if path.is_file()]:
        if old.relative_to(folder).as_posix() not in rendered:
            old.unlink()
    for name, content in rendered.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)


if __name__ == "__main__":
    write_source(Path(sys.argv[1]))
