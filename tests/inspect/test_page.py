"""The page: what is in it, and what a browser makes of it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.cli.model_names import find_costs
from harts.data import RolloutGroup
from harts.data.readers import GroupShape
from harts.data.trajectory import example_trajectories
from harts.inspect.breaks import BreakFinder
from harts.inspect.groups import group_tree
from harts.inspect.page import DrawnTrees, render_page
from harts.inspect.predict import ModelCosts
from harts.inspect.slots import StepPlanner
from harts.inspect.summary import Inspection
from tests.inspect.devtools import BROWSER, Page

HOSTILE = "</script><script>document.title = 'broken in'</script><img src=x onerror=alert(1)>"
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


class Letters:
    """Ids of the worked example to its letters, the first spelled in a hostile way."""

    def decode(self, ids: list[int]) -> str:
        return "".join([HOSTILE, *"bcdexyz"][i] for i in ids)


def page_of(*groups: RolloutGroup | GroupShape, model: ModelCosts | None = None, text: bool = False) -> str:
    tokenizer = Letters() if text else None
    inspection, trees, breaks = Inspection(model), DrawnTrees(tokenizer), BreakFinder(tokenizer)
    planner = None if model is None else StepPlanner(model)
    for group in groups:
        tree = group_tree(group)
        for user in (inspection, trees, breaks, *([] if planner is None else [planner])):
            user.add(tree)
    slots = None if planner is None else planner.picture()
    return render_page("example", inspection.report(skipped=2), trees=trees, breaks=breaks.report(), slots=slots)


def example(name: str) -> RolloutGroup:
    return RolloutGroup(name=name, trajectories=tuple(example_trajectories()))


def tiny() -> ModelCosts:
    named = find_costs("tiny:qwen3_5_text")
    return ModelCosts(name="tiny", dimensions=named.dimensions, costs=named.costs, saved_bytes_per_token=None)


def bushy(segments: int) -> GroupShape:
    """Trajectories that part from the one before after some of its tokens, two segments each."""
    rng = np.random.default_rng(0)
    length_N = rng.integers(300, 4000, segments // 2)
    lcp_N = np.minimum(length_N[1:], length_N[:-1]) * rng.random(length_N.size - 1) * 0.99
    return GroupShape(
        name="bushy",
        length_N=length_N,
        lcp_N=np.concatenate([[0], lcp_N.astype(np.int64)]),
        loss_spans=tuple(((int(n) // 2, int(n)),) for n in length_N),
    )


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_arrays_are_those_of_the_trees():
    data = data_of(page_of(example("one"), example("two")))

    def ints(name: str) -> list[int]:
        return np.frombuffer(base64.b64decode(data[name]), dtype="<i4").tolist()

    assert ints("parent") == [-1, 0, 1, 1, 0, -1, 5, 6, 6, 5]
    assert ints("start")[5:] == ints("start")[:5] == [0, 2, 3, 3, 2]
    assert ints("end")[5:] == [2, 3, 5, 4, 4]
    assert ints("top") == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert ints("multiplicity")[:5] == [4, 3, 1, 1, 1]
    assert ints("trained")[:5] == [1, 1, 2, 1, 2]
    assert ints("tail") == [1, 2, 3, 4, 6, 7, 8, 9]
    assert [(g["top"], g["size"], g["longest"]) for g in data["groups"]] == [(0, 4, 5), (4, 4, 5)]
    assert "2 damaged records" in data["note"]


def test_text_of_files_cannot_leave_the_data():
    page = page_of(example(HOSTILE), text=True)
    assert page.count("<script") == 2 and "<img" not in page
    data = data_of(page)
    assert data["groups"][0]["name"] == HOSTILE
    assert data["texts"] == [HOSTILE + "b", "c", "de", "z", "xy"]


def test_a_page_needs_nothing_else():
    page = page_of(example("one"))
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page)


def test_groups_beyond_the_limit_are_counted_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harts.inspect.page.MAX_SEGMENTS", 12)
    data = data_of(page_of(example("one"), example("two"), example("three")))
    assert [group["name"] for group in data["groups"]] == ["one", "two"]
    assert "first 2 of 3 groups" in data["note"]
    assert len(data["table"]) == 3


@pytest.fixture
def open_page(tmp_path: Path) -> Iterator[Any]:
    pages: list[Page] = []

    def opened(html: str, *, dark: bool = False) -> Page:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_text(html, encoding="utf-8")
        pages.append(Page(path.as_uri(), tmp_path / f"profile{len(pages)}", dark=dark).__enter__())
        return pages[-1]

    yield opened
    for page in pages:
        page.__exit__(None, None, None)


def place(page: Page, x: float, y: float, canvas: str = "tree") -> tuple[float, float]:
    """Of a share of the canvas' width and height, in pixels of the page."""
    box = page.run(f"(({{left, top, width, height}}) => [left, top, width, height])"
                   f"(document.getElementById('{canvas}').getBoundingClientRect())")  # fmt: skip
    return box[0] + x * box[2], box[1] + y * box[3]


def text_of(page: Page, name: str) -> str:
    return page.run(f"document.getElementById('{name}').textContent")


@needs_browser
def test_tooltip_zoom_and_keys(open_page: Any):
    page = open_page(page_of(example("letters"), text=True))
    assert text_of(page, "range") == "tokens 0 to 5 of 5, trajectories 0 to 4 of 4"
    page.mouse("mouseMoved", *place(page, 0.3, 0.9))  # the lowest row is abxy, its first two tokens are shared
    page.wait("!document.getElementById('tip').hidden")
    lines = text_of(page, "tip").split("\n")
    assert lines[:3] == ["group letters", "2 tokens, depth 0 to 2", "in 4 of 4 trajectories"]
    assert lines[3:] == ["50% trained", HOSTILE + "b"]
    page.mouse("mouseMoved", *place(page, 0.95, 0.9))
    page.wait("document.getElementById('tip').hidden")
    assert (page.run("document.title"), page.errors) == ("HARTS inspect: example", [])


@needs_browser
def test_wheel_double_click_and_buttons_change_what_is_seen(open_page: Any):
    page = open_page(page_of(bushy(400), example("letters")))
    everything = text_of(page, "range")
    assert everything.endswith("trajectories 0 to 204 of 204")
    at = place(page, 0.2, 0.5)
    page.mouse("mouseWheel", *at, deltaX=0, deltaY=-300)
    page.wait(f"document.getElementById('range').textContent !== {json.dumps(everything)}")
    numbers = [int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", text_of(page, "range"))]
    assert numbers[4] - numbers[3] < 80 and numbers[0] < 0.2 * numbers[2] < numbers[1]
    page.run("document.getElementById('all').click()")
    page.wait(f"document.getElementById('range').textContent === {json.dumps(everything)}")
    page.run("(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })(document.getElementById('jump'))")
    page.wait("document.getElementById('range').textContent.includes('trajectories 200 to 204')")
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, *place(page, 0.35, 0.9), button="left", clickCount=count)
    # The segment xy of the last row; a view is at least 8 tokens and 2 rows large.
    page.wait("document.getElementById('range').textContent.match(/^tokens 2 to 10 .* 202 to 204 of/)")
    page.run("document.getElementById('tree').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="0")
    page.wait(f"document.getElementById('range').textContent === {json.dumps(everything)}")
    assert page.errors == []


@needs_browser
def test_a_page_without_trees_still_has_its_numbers(open_page: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("harts.inspect.page.MAX_SEGMENTS", 4)
    page = open_page(page_of(example("letters"), model=tiny()))
    page.mouse("mouseMoved", *place(page, 0.5, 0.5))
    page.mouse("mouseWheel", *place(page, 0.5, 0.5), deltaX=0, deltaY=-300)
    page.run("document.getElementById('all').click()")
    assert "first 0 of 1 groups" in text_of(page, "note")
    assert "letters" in text_of(page, "groups")
    assert page.errors == []


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_what_is_chosen_and_the_theme(open_page: Any, dark: bool):
    page = open_page(page_of(example("letters"), model=tiny()), dark=dark)

    def pixel(x: float, y: float) -> list[int]:
        return page.run(f"(c => Array.from(c.getContext('2d').getImageData({x} * c.width, {y} * c.height, 1, 1).data))"
                        "(document.getElementById('tree'))")  # fmt: skip

    shared, alone = pixel(0.05, 0.3), pixel(0.75, 0.9)
    assert shared[:3] == ([0xE3, 0xF2, 0xFF] if dark else [0x08, 0x26, 0x3F])
    assert alone[:3] == ([0x3F, 0x6F, 0x9F] if dark else [0x5B, 0x9B, 0xD0])
    page.run("(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })(document.getElementById('colour'))")
    page.wait("document.getElementById('legend').textContent.includes('none trained')")
    page.run("new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame))")
    assert pixel(0.05, 0.3) != shared
    page.run("document.getElementById('board').scrollIntoView()")
    page.mouse("mouseMoved", *place(page, 0.01, 0.5 / 8, canvas="board"))
    page.wait("document.getElementById('tip').textContent.startsWith('rank 0, slot 0')")
    assert page.errors == []


@needs_browser
def test_a_hundred_thousand_segments_stay_fluid(open_page: Any):
    page = open_page(page_of(bushy(100_000)))
    assert page.run("count") > 95_000
    times = []
    for factor in (0.9, 0.8, 0.5, 0.1):
        page.run(f"(zoom({factor}), draw())")
        times.append(float(page.run("document.getElementById('tree').dataset.milliseconds")))
    # Without a graphics card and on a busy machine; a person's computer is some times faster.
    assert sorted(times)[1] < 300
    assert page.run("document.getElementsByTagName('*').length") < 500
