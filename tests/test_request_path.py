"""docs/architecture.md names the files of one request."""

import re

from tests.programs.request_path import ROOT, request_path

SECTION = re.compile(r"### Its files\n(.*?)\n## ", re.DOTALL)


def test_the_page_names_the_files_of_one_request_in_their_order() -> None:
    found = SECTION.search((ROOT / "docs" / "architecture.md").read_text())
    assert found is not None
    introduction, _, items = found[1].partition("\n1. ")
    own = [*request_path("build_app").files]
    assert re.findall(r"\]\(\.\./([^)]*)\)", items) == own
    further = {file for file in request_path("fleet").files if file not in own}
    assert set(re.findall(r"\]\(\.\./([^)]*)\)", introduction)) == further
