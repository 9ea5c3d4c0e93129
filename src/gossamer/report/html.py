"""One HTML page about a run or a comparison, with its pictures inside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gossamer.report.tables import table_cells

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; }
.wide { overflow-x: auto; }
"""


def page(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    images: Mapping[str, bytes],
    recipe: str,
) -> str:
    """HTML that needs no other file."""
    headings, cells = table_cells(rows)
    plain = [heading.replace("-\n", "").replace("\n", " ") for heading in headings]
    head = "".join(f"<th>{escape(text)}</th>" for text in plain)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in cells
    )
    pictures = "".join(
        f'<p><img alt="{escape(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(image).decode()}"></p>\n'
        for name, image in images.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
        f"</div>\n{pictures}<h2>Recipe</h2>\n<pre>{escape(recipe)}</pre>\n</body></html>\n"
    )
