"""Trees as text and as pictures."""

from __future__ import annotations

from xml.etree import ElementTree

import harts
from harts.data.trajectory import example_trajectories
from harts.inspect.view import draw_lines
from harts.tree import tree_from_lcp


def picture_of(view: harts.TreeView) -> ElementTree.Element:
    html = view._repr_html_()
    return ElementTree.fromstring(html.replace("<br>", "<br/>").replace("&times;", "x"))


def test_worked_example_as_text():
    view = harts.describe(example_trajectories())
    assert view.summary.ratio == 2.0
    assert repr(view).splitlines()[1:3] == ["(2 tokens) x4", "├─ (1 tokens) x3, ends 3"]


def test_all_sources_give_the_same_view():
    trajectories = example_trajectories()
    view = harts.describe(trajectories)
    group = harts.RolloutGroup(name="<letters>", trajectories=tuple(trajectories))
    shape = harts.GroupShape(name="", length_N=view.tree.length_N, lcp_N=view.tree.lcp_N, loss_spans=((),) * 4)
    assert [repr(harts.describe(s)).splitlines()[0] for s in (view.tree, group, shape)] == [view.headline()] * 3
    assert "<b>&lt;letters&gt;</b>" in harts.describe(group)._repr_html_()


def test_the_area_of_the_picture_is_that_of_all_tokens():
    rectangles = list(picture_of(harts.describe(example_trajectories())).iter("rect"))
    assert len(rectangles) == 5
    areas = [(float(r.get("width", 0)) + 1) * (float(r.get("height", 0)) + 1) for r in rectangles]
    token = 900 / 5 * 22
    assert abs(sum(areas) - 16 * token) < 1
    titles = [title.text for title in picture_of(harts.describe(example_trajectories())).iter("title")]
    assert titles[0] == "2 tokens, depth 0 to 2, in 4 of 4"


def test_large_trees_are_clipped():
    count = 3000
    tree = tree_from_lcp(range(count), [10] * count, [0] + [5] * (count - 1))
    lines = draw_lines(tree, most=10).splitlines()
    assert len(lines) == 11 and lines[-1] == f"... {count + 1 - 10:,} more segments"
    assert len(list(picture_of(harts.describe(tree)).iter("rect"))) == 2000
    assert "1,001 smaller segments are not drawn" in harts.describe(tree)._repr_html_()
