#!/bin/sh
# gpuctl
# NVIDIA device nodes with the numbers of this boot: each GPU, nvidiactl, nvidia-uvm and, where the driver has them,
# modeset and MIG capabilities. A node that is missing, has an old number or is no device is made anew by
# nvidia-modprobe, and looked at again. `--check` says what would be made and does nothing.
# (With -u, nvidia-modprobe takes -c for the minor of nvidia-uvm, so that it needs a call of its own.)
proc=${GPUCTL_PROC:-/proc} dev=${GPUCTL_DEV:-/dev} check=
[ "$1" = --check ] && check=1
failed=0

major() { # of a name in /proc/devices; nothing where the driver does not have it
    awk -v name="$1" '/^Block/ { exit } $2 == name { print $1; exit }' "$proc/devices"
}

right() { # PATH MAJOR MINOR
    [ -c "$1" ] && [ "$(stat -c %t:%T "$1")" = "$(printf %x:%x "$2" "$3")" ]
}

node() { # PATH MAJOR MINOR, then the arguments of nvidia-modprobe that make it
    path=$dev/$1 number=$2:$3
    right "$path" "$2" "$3" && return
    if [ -n "$check" ]; then
        echo "would make $path $number"
        return
    fi
    wanted_major=$2 wanted_minor=$3
    shift 3
    [ -e "$path" ] && [ ! -c "$path" ] && rm -rf "$path"
    nvidia-modprobe "$@" || echo "nvidia-modprobe $* ended with $?" >&2
    if right "$path" "$wanted_major" "$wanted_minor"; then
        echo "made $path $number"
    else
        echo "$path could not be made with number $number" >&2
        failed=1
    fi
}

if ! command -v nvidia-modprobe >/dev/null; then
    echo "there is no nvidia-modprobe; install it with the driver" >&2
    exit 1
fi
if [ -z "$(major nvidia-uvm)" ]; then
    if [ -n "$check" ]; then
        echo "would load nvidia-uvm"
    else
        nvidia-modprobe -c 0 -u && [ -n "$(major nvidia-uvm)" ] && echo "made nvidia-uvm known to the kernel"
    fi
fi
gpu=$(major nvidia) gpu=${gpu:-$(major nvidia-frontend)} gpu=${gpu:-195}
minors=$(sed -n 's/^Device Minor:[[:space:]]*//p' "$proc"/driver/nvidia/gpus/*/information 2>/dev/null)
for minor in ${minors:-0}; do
    node "nvidia$minor" "$gpu" "$minor" -c "$minor"
done
node nvidiactl "$gpu" 255 -c 255
uvm=$(major nvidia-uvm)
if [ -n "$uvm" ]; then
    node nvidia-uvm "$uvm" 0 -c 0 -u
    node nvidia-uvm-tools "$uvm" 1 -c 0 -u
elif [ -z "$check" ]; then
    echo "the kernel has no nvidia-uvm: is the module there for this kernel? (dkms status)" >&2
    failed=1
fi
[ -n "$(major nvidia-modeset)" ] && node nvidia-modeset "$gpu" 254 -m
caps=$(major nvidia-caps)
if [ -n "$caps" ]; then
    for file in $(find "$proc/driver/nvidia/capabilities" -type f 2>/dev/null); do
        minor=$(sed -n 's/^DeviceFileMinor:[[:space:]]*//p' "$file")
        [ -n "$minor" ] && node "nvidia-caps/nvidia-cap$minor" "$caps" "$minor" -f "$file"
    done
fi
exit $failed
