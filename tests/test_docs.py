"""The documentation site: generated pages are current, and a strict build finds no broken link."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.generate_docs import PAGES, SLOW_PAGES

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name):
    message = f"docs/{name} is out of date; run python tools/generate_docs.py"
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), message


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_of_settings_is_current():
    page = (ROOT / "docs" / "choosing_settings.md").read_text()
    assert page == SLOW_PAGES["choosing_settings.md"]()


def test_every_page_is_in_the_navigation():
    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for each in entry.values() for child in each for page in pages(child)]

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = sorted(page for entry in navigation for page in pages(entry))
    assert listed == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site_builds_strictly(tmp_path):
    """In a copy: the builder writes its output and a cache beside the configuration."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "megatron_untied").symlink_to(ROOT / "megatron_untied")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert "megatron_untied" in page
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("untied_attention", "chunked_cross_entropy", "streamed_layers"):
        assert f'id="megatron_untied.{name}"' in reference, f"{name} has no generated reference"
