"""Makes the pictures in docs/pictures/: the architecture, and drawings of reports by the code that makes them there.

python scripts/pictures.py [--run DIR]

With --run also run.png, a screenshot of the top of that run's report (needs chromium).
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxstack.observe.report.markup import CSS
from jaxstack.observe.report.panels import picture_layouts, picture_of_mesh, render_picture
from jaxstack.parallel.pipeline.schedule import SCHEDULES, describe_schedule
from jaxstack.plan.draw import describe_plan
from jaxstack.run_config import load_config
from scripts.architecture_picture import drawings as architecture_drawings

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
LAYOUT = ("model.preset=tiny", "parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2")


def standalone(drawing: str, kind: str) -> str:
    """Return a drawing of a report as an SVG file, with the report's colours."""
    rules = re.findall(r"(?:^|(?<=\} )):root \{.*?\}|^@media \(prefers-color-scheme.*?\} \}", CSS, re.M | re.S)
    kinds = re.compile(r"\.(hue|task|sharding|pipeline)")
    drawn = [rule for rule in re.split(r"(?<=\})\s+", CSS) if kinds.match(rule)]
    found = re.search(r"<svg (.*?)>(.*)</svg>", drawing, re.S)
    assert found is not None
    attributes = re.sub(r' style="[^"]*"', "", found[1])
    width, height = attributes.split('viewBox="0 0 ')[1].split('"')[0].split()
    style = "\n".join([*rules, *drawn, "text { font-family: system-ui, sans-serif; }"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {attributes}>\n'
        f'<style>{style}</style>\n<g class="{kind}">{found[2]}</g>\n</svg>\n'
    )


def make_pictures() -> dict[str, str]:
    """Return file name -> content of every drawing."""
    drawings = architecture_drawings()
    plain = describe_plan(load_config(None, LAYOUT))["sharding"]
    drawings["mesh.svg"] = standalone(picture_of_mesh(plain["mesh"])[2], "sharding")
    zero = describe_plan(load_config(None, [*LAYOUT, "parallel.zero=1"]))["sharding"]
    for suffix, sharding in (("", plain), ("-zero1", zero)):
        for name in ("up_proj", "down_proj"):
            row = next(row for row in sharding["parameters"] if f"{name}/kernel" in row["parameter"])
            ((_, _, picture),) = picture_layouts([row], sharding["mesh"])
            drawings[f"{name}{suffix}.svg"] = standalone(picture, "sharding")
    del drawings["down_proj-zero1.svg"]
    for name, make in SCHEDULES.items():
        schedule = make(4, 8, 2 if name == "interleaved" else 1)
        drawings[f"schedule-{name}.svg"] = standalone(render_picture(describe_schedule(schedule)["spans"]), "pipeline")
    return drawings


def photograph(run_dir: Path, path: Path) -> None:
    """Write a PNG of the top of a run's report."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("scripts/pictures.py --run needs chromium.")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync --hide-scrollbars"
    with tempfile.TemporaryDirectory() as profile:
        shot = [f"--user-data-dir={profile}", "--window-size=1080,1000", f"--screenshot={path}"]
        address = (run_dir / "report.html").resolve().as_uri()
        subprocess.run([chromium, *flags.split(), *shot, address], check=True, capture_output=True)


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="DIR", help="a run directory, for run.png")
    args = parser.parse_args()
    for name, content in make_pictures().items():
        (PICTURES / name).write_text(content, encoding="utf-8")
    if args.run is not None:
        photograph(args.run, PICTURES / "run.png")
    print(PICTURES.relative_to(ROOT))


if __name__ == "__main__":
    main()
