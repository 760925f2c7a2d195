"""What the documentation build adds: files of the repository that pages link to, at the same relative place in the site.

Pages are written for readers of the repository, too, so they link to ``../benchmarks/results/...`` and ``../examples``.
Such files are copied into the site; links to folders lead to a listing of nothing there and become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# [text](target "title"), also as an image
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)#\s]+)([^)]*)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the linked files under ``repository/``."""
    wanted = {}
    for page in files.documentation_pages():
        folder = Path(page.abs_src_path).parent
        for _, _, target, _ in LINK.findall(Path(page.abs_src_path).read_text()):
            path = (folder / target).resolve()
            if _outside(path) and path.is_file():
                wanted[_place(path)] = path
    for place, path in wanted.items():
        # content, not the path: a Markdown file of the repository is shown as it is
        files.append(File.generated(config, place, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links that leave the folder of the documentation at the copies."""
    folder = Path(page.file.abs_src_path).parent
    depth = "../" * (len(Path(page.file.src_uri).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        image, text, target, rest = match.groups()
        path = (folder / target).resolve()
        if not _outside(path):
            return match[0]
        return f"{image}[{text}]({depth}{_place(path)}{rest})" if path.is_file() else text

    return LINK.sub(moved, markdown)


def _outside(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")


def _place(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    # shown as text by a browser, and not taken for a page
    return f"repository/{name}" + (".txt" if path.suffix in (".md", ".py", ".yaml", ".sbatch", ".sh", ".jsonl") else "")
