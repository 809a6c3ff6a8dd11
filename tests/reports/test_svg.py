from xml.etree import ElementTree

from jaxpipe.reports import svg


def test_documents_are_well_formed_and_texts_escaped():
    parts = [
        svg.text("a < b & c", 1, 2, 10, fill="red"),
        svg.upright("12.3", 10, 20, 10),
        svg.group([svg.text("x", 0, 0, 5)], text_anchor="middle"),
        svg.hatch("lines", "white"),
    ]
    root = ElementTree.fromstring(svg.document(300.4, 200, parts))
    assert (root.get("width"), root.get("viewBox")) == ("300", "0 0 300 200")
    name = "{http://www.w3.org/2000/svg}text"
    assert [node.text for node in root.iter(name)] == ["a < b & c", "12.3", "x"]
    level, turned, _ = root.iter(name)
    assert level.get("fill") == "red"
    # The middle of capitals and digits, some 0.72 of the size high, is at the given place.
    assert (level.get("x"), level.get("y")) == ("1", "5.6")
    assert turned.get("transform") == f"rotate(-90 {turned.get('x')} {turned.get('y')})"
    assert (turned.get("x"), turned.get("y")) == ("13.6", "20")


def test_boxes_and_lines_are_one_path_with_short_numbers():
    assert svg.boxes([(1, 2.5, 3, 4), (0, 0, 1 / 3, 10)], fill="red") == (
        '<path d="M1 2.5h3v4h-3zM0 0h0.33v10h-0.33z" fill="red"/>'
    )
    assert svg.lines([[(0, 0), (10, 0), (10, 5)]], stroke_width=2) == (
        '<path d="M0 0L10 0L10 5" stroke-width="2"/>'
    )
