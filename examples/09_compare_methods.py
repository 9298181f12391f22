"""
Comparing methods in Python
===========================

``acclimate run`` in a few lines: a plan, its results, a table and two figures.
"""

# %%
# A plan is plain data with the options of the command line. A stopped run resumes from its folder.
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from acclimate.bench.plan import Plan
from acclimate.bench.preflight import check
from acclimate.bench.run import Run
from acclimate.bench.tables import as_markdown, summary_table

plan = Plan(
    methods=["source", "bn-adapt", "tent", "eata", "eata-c"],
    model="digits-resnet",
    data="digits",
    shifts=["gaussian_noise", "defocus_blur", "fog", "contrast"],
    severity=4,
    images=256,
    source_images=256,
    probe_images=256,  # clean images, to see what is forgotten
    overrides={name: {"lr": 5e-3} for name in ("tent", "eata", "eata-c")},
)
run = Run(plan, Path(tempfile.mkdtemp()))
check(run)
results = [run.do(job) for job in plan.jobs()]
print(as_markdown(*summary_table(results)))

# %%
# The figures of ``acclimate report`` are functions of results; here with your own axes:
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
for result in results:
    axes[0].plot([100 * domain.accuracy for domain in result.domains], "o-", label=result.method)
    passes = (result.forwards + result.backwards) / sum(domain.images for domain in result.domains)
    axes[1].scatter(passes, 100 * result.ece, s=60, label=result.method)
names = [domain.name for domain in results[0].domains]
axes[0].set_xticks(range(len(names)), names, rotation=30, ha="right")
axes[0].set_ylabel("accuracy (%)")
axes[1].set(xlabel="passes per image", ylabel="ECE (%)", xlim=(0, 4))
axes[1].legend()
figure.tight_layout()
