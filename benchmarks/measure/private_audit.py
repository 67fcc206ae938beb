"""Audit private steps with canaries, and compare their promise with a second accountant.

    python benchmarks/measure/private_audit.py [--json PATH] [--runs COUNT]

For each setting a budget is solved, the second accountant bounds its ε from below and above, and an adversary who sees
the trained weights guesses which canaries were in the data. The audited ε is a lower bound with a confidence of 95 %.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record_file import write_record

from pomona.privacy import EPSILON_RAMP, Budget, Clipping, Ramp, audit
from pomona.privacy.second_accountant import bracket_epsilon

CANARIES, DELTA = 1024, 1e-6
INTERVAL = 1e-4  # of the second accountant's grid
DRAWS = {"keep": 0.5, "schedule": "constant", "group": None}


@dataclass(frozen=True)
class Setting:
    """A private training that is audited: its method, budget and clipping."""

    name: str
    method: str = "dpsgd"
    rate: float = 1.0
    steps: int = 2
    epsilon: float = 8.0
    share: float = 0.0
    ramps: dict[str, Ramp] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def solve(self) -> Budget:
        """Return the budget of the setting."""
        size = round(self.rate * CANARIES)
        target = {"epsilon": self.epsilon, "delta": DELTA, "rows": CANARIES, "batch_size": size, "steps": self.steps}
        return Budget.solve(**target, share=self.share, **self.ramps)  # type: ignore[arg-type]


ADAPTIVE, LAYERED = {"clipping": Clipping(quantile=0.5)}, {"clipping": Clipping(layers=True)}
SETTINGS = (
    Setting("all rows"),
    Setting("samples", rate=0.5, steps=4),
    Setting("many small samples", rate=0.1, steps=20),
    Setting("small ε", steps=1, epsilon=2.0),
    Setting("all rows", method="gip", share=0.5, options=DRAWS),
    Setting("samples", method="gip", rate=0.5, steps=4, share=0.5, options=DRAWS),
    Setting("random indices", method="random", rate=0.5, steps=4, options=DRAWS),
    Setting("signs of each example", method="datalens", options={"keep": 0.01}),
    Setting("clipped by layer", options=LAYERED),
    Setting("clipped by layer, samples", rate=0.5, steps=4, options=LAYERED),
    Setting("norms follow a quantile", rate=0.5, steps=4, options=ADAPTIVE),
    Setting("norms of layers follow it", steps=4, options={"clipping": Clipping(layers=True, quantile=0.5)}),
    Setting("falling noise", steps=4, ramps={"noise_ramp": Ramp(1.5, 0.75, 4)}),
    Setting(
        "falling noise and norm",
        rate=0.5,
        steps=4,
        ramps={"noise_ramp": Ramp(1.5, 0.75, 4)},
        options={"clipping": Clipping(ramp=(1.0, 0.5))},
    ),
    Setting(
        "the authors' ε ramp",
        method="gip",
        rate=0.5,
        steps=4,
        share=0.5,
        ramps={"index_ramp": EPSILON_RAMP},
        options=DRAWS,
    ),
)


def measure_setting(setting: Setting, runs: int) -> dict[str, Any]:
    """Return the promise of a setting, the second accountant's bounds on it, and what an audit finds."""
    budget = setting.solve()
    low, high = bracket_epsilon(budget.pairs(range(budget.steps)), DELTA, INTERVAL)
    found = audit(budget, method=setting.method, runs=runs, **setting.options)
    return {
        "setting": setting.name,
        "method": setting.method,
        "rate": setting.rate,
        "steps": setting.steps,
        "epsilon": setting.epsilon,
        "bounds": [low, high],
        "audited": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--runs", type=int, default=24, help="runs of each setting")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for setting in SETTINGS:
        row = measure_setting(setting, options.runs)
        rows.append(row)
        low, high = row["bounds"]
        what = f"{row['method']:8} {row['setting']:25} q = {row['rate']:<4g} {row['steps']:3} steps"
        print(
            f"{what}: ε = {row['epsilon']:g}, {low:.3f} to {high:.3f} by the second accountant, "
            f"at least {row['audited']:.2f} by the audit",
            flush=True,
        )
    write_record(options.json, audit=rows)


if __name__ == "__main__":
    main()
