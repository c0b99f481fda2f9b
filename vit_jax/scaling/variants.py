"""Other fits to compare with: forms, objectives and starting points."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.scaling import choice, forms
from vit_jax.scaling import fit as fit_lib
from vit_jax.scaling.descent import LOG_HUBER, Objective
from vit_jax.scaling.seeds import Seeds

ALL = 'all'
OBJECTIVES = {
    'delta 0.01': Objective(delta=0.01),
    'delta 0.1': Objective(delta=0.1),
    'log squares': Objective(delta=np.inf),
    'linear, delta 0.001': Objective(log=False),
    'linear squares': Objective(delta=np.inf, log=False),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to fit.

    Attributes:
      name: in tables.
      form: name of a form, or `choice.AUTO`.
      objective: that is minimized.
      starts: number of starting points, the first ones; 0 for all.
    """

    name: str
    form: str
    objective: Objective = LOG_HUBER
    starts: int = 0

    def fit(self, x: np.ndarray, y: np.ndarray, *, seeds: Seeds | None = None) -> fit_lib.Fit:
        """The fit to points, without a bootstrap; raises UserError as `fit.fit`."""
        if self.form == choice.AUTO:
            return choice.fit(x, y, seeds=seeds)
        form = forms.find(self.form)
        return fit_lib.fit(form, x, y, objective=self.objective, starts=self.starts, seeds=seeds)


def find(names: Sequence[str], form: str, columns: int) -> list[Variant]:
    """The variants of `--against`: names of forms, or `all`.

    Args:
      names: of forms; `all` stands for every other form, and for the form that is fitted (`shifted`
        for `auto`) with other objectives and from its first starting point alone.
      form: that is fitted.
      columns: of x.

    Raises:
      UserError: for an unknown name.
    """
    found = []
    for name in names:
        if name == ALL:
            found += _all(form, columns)
        elif name == choice.AUTO:
            found.append(Variant(name, name))
        else:
            found.append(Variant(name, forms.find(name).name))
    return list({variant.name: variant for variant in found}.values())


def _all(form: str, columns: int) -> list[Variant]:
    others = [choice.AUTO] if columns == 1 else []
    others += [other.name for other in forms.FORMS.values() if other.columns == columns]
    base = form if form != choice.AUTO else 'shifted' if columns == 1 else 'joint'
    if forms.find(base).solve:
        return [Variant(name, name) for name in others if name != form]
    return [
        *(Variant(name, name) for name in others if name != form),
        *(Variant(f'{base}, {name}', base, value) for name, value in OBJECTIVES.items()),
        Variant(f'{base}, first start', base, starts=1),
    ]
