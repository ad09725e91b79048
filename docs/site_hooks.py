"""Brings benchmarks/reports into the site, where links of docs/ to them are relative to the repository."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

REPORTS = Path(__file__).resolve().parents[1] / "benchmarks" / "reports"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every report and its charts."""
    for path in sorted(REPORTS.iterdir()):
        files.append(File.generated(config, f"reports/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to reports lead to their pages."""
    return markdown.replace("](../benchmarks/reports/", "](reports/")
