"""Where the runs are that version 0.1.0 wrote."""

from conftest import ROOT

OLD = ROOT / "tests" / "from_0_1_0"
