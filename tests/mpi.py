"""Whether MPI works here, asked once by each process of the tests: that starts two more."""

import pytest

from ranvier.launch.mpiexec import mpi_available

UNUSABLE = mpi_available()
NEEDS_MPI = pytest.mark.skipif(UNUSABLE is not None, reason=str(UNUSABLE))
MPI = pytest.param("mpi", marks=[pytest.mark.mpi, NEEDS_MPI])
