"""What `make demo` runs: a private classifier of digits, its certificate, and the spread over three seeds."""

import json
from pathlib import Path
from statistics import mean, stdev

from quietgrad import Certificate, Plan, cli, data

folder = cli.fresh(Path("demo") / "digits")
cli.train("digits", epsilon=3.0, out=folder)  # what `quietgrad train digits --epsilon 3` does

certificate = Certificate.from_json((folder / "publish" / "certificate.json").read_text())
print(f"\nthe certificate, in {folder / 'publish'} as JSON and as a page to read:\n\n{certificate}")

print("\nthe same plan from three seeds (digits is declared public, so its scores may be shown and compared):\n")
digits, plan, scores = data.load("digits"), Plan.from_json(json.dumps(certificate.plan)), []
for seed in (1, 2, 3):
    done = cli.fit(plan, cli.started("mlp", digits, seed), digits, seed=seed)
    scores.append(100 * done.accuracy)
    print(f"  seed {seed}    {scores[-1]:.1f} % of {len(digits.test[0])} held-out digits")
print(f"  together  {mean(scores):.1f} % on average, standard deviation {stdev(scores):.1f}")
