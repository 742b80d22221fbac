#!/bin/sh
# Install an environment that needs other package versions in a virtual environment of its own:
#   sh scripts/apart.sh pusht      .venv-pusht, for env=pusht
#   sh scripts/apart.sh mjlab      .venv-mjlab, for env=mjlab
#   sh scripts/apart.sh robosuite  .venv-robosuite, for env=robosuite_*
#   sh scripts/apart.sh NAME PACKAGE...   .venv-NAME with any packages, for env=gymnasium_process
set -eu
python=${PYTHON:-python3}
name=${1:?a name: pusht, mjlab, robosuite, or any name and packages}
shift
case $name in
    # The version of torch is the one of constraints.txt: on a machine without a GPU, the CPU build.
    mjlab) set -- mjlab==1.6.0 "$(grep '^torch==' constraints.txt)" ;;
    robosuite) set -- robosuite==1.5.2 mujoco==3.3.0 ;;
    pusht) set -- gym-pusht==0.1.8 'pymunk<7' shapely ;;
esac
[ $# -gt 0 ] || { echo "which packages? sh scripts/apart.sh $name PACKAGE..."; exit 2; }
$python -m venv ".venv-$name"
".venv-$name/bin/pip" install --quiet gymnasium numpy "$@"
echo ".venv-$name has $*: env=... env.apart=$name"
