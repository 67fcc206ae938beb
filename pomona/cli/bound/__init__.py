"""`pomona bound`: the formulas of the papers, and a certificate for a trained network.

group          the command group
options        options that several commands share, and parsers of lists
output         tables, JSON and charts
theorem_forms  one theorem of Qian & Klabjan (2021) in its three forms
laws           laws of random weights by name, with their assumptions
qian_klabjan   magnitude, random, norm, cnn, estimate
certificate    certify, fraction
predictions    certify --predictions
spectral  gip  balanced  iterand  convergence     one command each
"""

from . import (  # noqa: F401, I001  the order of `pomona bound --help`
    qian_klabjan,
    certificate,
    spectral,
    gip,
    balanced,
    iterand,
    convergence,
)
