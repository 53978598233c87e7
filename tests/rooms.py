# SPDX-License-Identifier: Apache-2.0
"""Draws the imports between rooms (packages) into CONTRIBUTING.md: `python -m tests.rooms`."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import grimp

PACKAGE = "dmi_connector"
PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms: written by `make rooms` -->", "<!-- end of rooms -->"
Edges = dict[str, set[str]]
"""{room: rooms that it imports}."""


def read_imports() -> grimp.ImportGraph:
    """All imports of the package, including those under TYPE_CHECKING and inside functions."""
    return grimp.build_graph(PACKAGE, exclude_type_checking_imports=False, cache_dir=None)


def _rooms(graph: grimp.ImportGraph, parent: str) -> list[str]:
    """The rooms in a package. A room without files of its own is replaced by its inner rooms."""
    found: list[str] = []
    for child in sorted(graph.find_children(parent)):
        inner = graph.find_children(child)
        if inner and all(graph.find_children(each) for each in inner):
            found += _rooms(graph, child)
        elif inner:
            found.append(child)
    return found


def _edges(graph: grimp.ImportGraph, rooms: list[str]) -> Edges:
    """The direct imports between rooms. The files of a room include those of its inner rooms."""
    files = {room: graph.find_descendants(room) | {room} for room in rooms}
    imported = {
        room: set().union(*map(graph.find_modules_directly_imported_by, inside)) for room, inside in files.items()
    }
    return {a: {b for b in rooms if b != a and imported[a] & files[b]} for a in rooms}


def _reach(edges: Edges, room: str) -> set[str]:
    """All rooms that a room imports, directly or through other rooms."""
    return edges[room].union(*(_reach(edges, each) for each in edges[room]))


def _drawn(edges: Edges) -> Edges:
    """The edges to draw: without imports that are also made through another room."""
    return {
        room: {each for each in direct if not any(each in _reach(edges, other) for other in direct)}
        for room, direct in edges.items()
    }


def _lines(graph: grimp.ImportGraph, parent: str, indent: str) -> list[str]:
    """The lines of the drawing: the rooms in a package, importing rooms first, then their imports."""
    edges = _edges(graph, _rooms(graph, parent))
    order = [*TopologicalSorter(edges).static_order()][::-1]
    lines: list[str] = []
    for room in order:
        node, label = _node(room), room.removeprefix(f"{parent}.").replace(".", "/")
        inner = _lines(graph, room, indent + "  ")
        lines += (
            [f'{indent}subgraph {node}["{label}"]', *inner, f"{indent}end"] if inner else [f'{indent}{node}["{label}"]']
        )
    drawn = _drawn(edges)
    return lines + [
        f"{indent}{_node(room)} --> {' & '.join(map(_node, sorted(drawn[room])))}" for room in order if drawn[room]
    ]


def _node(room: str) -> str:
    """The name of a room in Mermaid. Names with an underscore cannot clash with reserved words."""
    return room.removeprefix(f"{PACKAGE}.").replace(".", "_") + "_"


def draw(graph: grimp.ImportGraph) -> str:
    """The drawing as Markdown with Mermaid."""
    return "\n".join(
        [
            "`A --> B`: files of A import files of B. An arrow is left out if other arrows lead from A to B.",
            "",
            "```mermaid",
            "flowchart TD",
            *_lines(graph, PACKAGE, "  "),
            "```",
        ]
    )


def drawing() -> str:
    """The drawing in the page. Raises ValueError if one of its two marks is missing."""
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[begin:end].strip()


def write() -> None:
    """Write the drawing of the current imports between the two marks of the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{draw(read_imports())}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    write()
