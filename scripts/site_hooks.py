"""Hooks of mkdocs: add the files outside of docs/, the notebook and the source of the examples.

So the pages are plain Markdown that also reads well in the repository, and nothing is stored twice.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/jaxstack/jaxstack/blob/main/"
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File at the top of the repository -> page."""
NOTEBOOK = "first_hour"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from other files."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    notebook = json.loads((ROOT / "docs" / f"{NOTEBOOK}.ipynb").read_text(encoding="utf-8"))
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to pages of the site or the repository; replace `<!-- source: FILE -->` by the file's text."""
    markdown = re.sub(r"<!-- source: (\S+) -->", _source, markdown)
    at_top = page.file.src_uri in OUTSIDE.values()
    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[\w-]+)?\)", lambda link: _link(link, at_top), markdown)


def _source(match: re.Match[str]) -> str:
    text = (ROOT / "docs" / match[1]).read_text(encoding="utf-8")
    return f"```python\n{text}```"


def _link(match: re.Match[str], at_top: bool) -> str:
    """Return a Markdown link with its address on the site."""
    target = match[1]
    anchor = match[2] or ""
    path = target if at_top else target.removeprefix("../") if target.startswith("../") else f"docs/{target}"
    if path in OUTSIDE:
        return f"]({OUTSIDE[path]}{anchor})"
    if path == f"docs/{NOTEBOOK}.ipynb":
        return f"]({NOTEBOOK}.md{anchor})"
    if path.startswith("docs/") and path != "docs/":
        return f"]({path.removeprefix('docs/')}{anchor})"
    return f"]({REPOSITORY}{path}{anchor})"


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: texts, code, and outputs."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        language = "sh" if text.startswith("!") else "python"
        parts.append(f"```{language}\n{text.removeprefix('!')}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
        if printed:
            parts.append(f'```text title="prints"\n{printed.rstrip()}\n```')
    parts.append(f'<a href="{NOTEBOOK}.ipynb" download>This page as a notebook</a>')
    return "\n\n".join(parts)
