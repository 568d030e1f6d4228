"""The page of a certificate: complete, closed in itself, and nothing in it can run."""

import dataclasses
from html.parser import HTMLParser

import pytest

import quietgrad as qg
from quietgrad.certificate import certify
from quietgrad.report import certificate_page

VOID = {"meta", "br"}
SHAPES = {"line", "circle", "polyline"}  # of SVG, which close themselves


class Reader(HTMLParser):
    """Takes the texts; asserts that tags are closed in turn."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID | SHAPES:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in SHAPES

    def handle_endtag(self, tag):
        if tag not in SHAPES:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return " ".join(reader.texts), reader.attributes


@pytest.fixture(scope="module")
def plan():
    return qg.dp_sgd(examples=1000, batch_size=100, epochs=3).calibrate(epsilon=2.0, delta=1e-5)


def certificate(plan, secure=True):
    return certify(plan, plan.steps, None, secure=secure, run="0f")


@pytest.mark.parametrize("status", ["proved", "seeded", "none"])
def test_the_page_says_what_the_certificate_says(plan, status):
    if status == "none":
        plan = plan.calibrate(epsilon=float("inf"), delta=1e-5)
    issued = certificate(plan, secure=status != "seeded")
    page = certificate_page(issued)
    text, attributes = read(page)
    assert issued.status == status and issued.headline in text
    for said in (issued.sampling, issued.unit, issued.tuning, issued.rounding, *issued.assumptions, *issued.versions):
        assert said in text
    slots = ("sample", "loss", "smooth", "bound", "noise", "denoise", "optimizer")
    at = [page.index(f"<th>{slot}</th>") for slot in slots]
    assert at == sorted(at) and text.count("sees releases only") == 2 and text.count("sees data") == 4
    assert not any(name in ("src", "href", "action") or name.startswith("on") for name, _ in attributes)


def test_nothing_in_it_can_run_or_load(plan):
    evil = "<script>alert('&\"')</script>"
    issued = dataclasses.replace(
        certificate(plan),
        unit=evil, adjacency=evil, accountant=evil, sampling=evil, event=evil, randomness=evil, covers=evil,
        public_data=evil, tuning=evil, assumptions=(evil,), rounding=evil, audit=evil, created=evil, run=evil,
        versions={evil: evil}, plan={"noise": {"stage": evil, evil: evil}, "loss": evil, "sample": [evil]},
    )  # fmt: skip
    page = certificate_page(issued)
    text, _ = read(page)
    assert "<script" not in page and "http" not in page and "url(" not in page and "@import" not in page
    assert text.count(evil) >= 16


def test_a_flat_or_short_curve_is_no_error(plan):
    for curve in ((), ((1.0, 1e-5),), ((1.0, 1e-5), (1.0, 1e-6)), ((0.0, 1e-3), (1e-9, 1e-4)), ((float("inf"), 1e-5),)):
        read(certificate_page(dataclasses.replace(certificate(plan), delta_curve=curve)))
