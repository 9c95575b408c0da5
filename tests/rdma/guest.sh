# In the guest: brings Soft-RoCE up on the loopback interface, then runs the tests that need a device.
# Set by `__main__`: CHECKOUT, PYTHON, PYVERBS (the folder that holds the package), ARGUMENTS.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
ip link set lo up
rdma link add rxe0 type rxe netdev lo || exit 60
rdma link show
cd "$CHECKOUT" || exit 61
# The one package, not all that lies beside it.
mkdir -p /tmp/pyverbs-only && ln -sfn "$PYVERBS" /tmp/pyverbs-only/pyverbs
export PYTHONPATH=/tmp/pyverbs-only:$CHECKOUT PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# Without the fixtures of the platform: what they import takes the emulated processor a minute.
PLUGINS="-p pytest_timeout -p anyio.pytest_plugin -p tests.fixtures.loops"
# shellcheck disable=SC2086
"$PYTHON" -m pytest --noconftest $PLUGINS -p no:cacheprovider --color=no -v --durations=3 $ARGUMENTS
