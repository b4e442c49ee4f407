"""Whether MPI works here; each process of the tests checks it once, by starting two more processes."""

import pytest

from ranvier.launch.mpiexec import mpi_available

UNUSABLE = mpi_available()
NEEDS_MPI = pytest.mark.skipif(UNUSABLE is not None, reason=str(UNUSABLE))
MPI = pytest.param("mpi", marks=[pytest.mark.mpi, NEEDS_MPI])
