#!/bin/sh
# gpuctl
# Makes the NVIDIA device nodes with today's numbers: each GPU, nvidiactl, nvidia-uvm and, where there are any, modeset,
# NVSwitch and MIG capabilities. nvidia-modprobe compares with /proc/devices and replaces nodes with an old number.
failed=0
make() {
    nvidia-modprobe "$@" || { echo "gpuctl: nvidia-modprobe $* ended with $?" >&2; failed=1; }
}
if ! command -v nvidia-modprobe >/dev/null; then
    echo "gpuctl: there is no nvidia-modprobe; install it with the driver" >&2
    exit 1
fi
minors=$(sed -n 's/^Device Minor:[[:space:]]*//p' /proc/driver/nvidia/gpus/*/information 2>/dev/null)
for minor in ${minors:-0}; do
    make -c "$minor"
done
make -c 0 -u
grep -q ' nvidia-modeset$' /proc/devices && make -m
grep -q ' nvidia-nvswitch$' /proc/devices && make -s
for capability in $(find /proc/driver/nvidia/capabilities -type f -name access 2>/dev/null); do
    make -f "$capability"
done
exit $failed
