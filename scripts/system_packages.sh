#!/bin/sh
# The system packages that posttrain can use and pip cannot install. Installs them where it may
# (Debian and Ubuntu, as root or with a sudo that asks nothing), else says what is missing. Always
# succeeds: everything but what needs them works without.
#
#   bubblewrap   the sandbox of the reward `code`: docs/security.md
#   chromium     with `chromium` as the argument: the browser that `make view-test` drives
#
#   sh scripts/system_packages.sh [PACKAGE …]

missing() {
  case "$1" in
    bubblewrap) echo "bubblewrap is missing ($2): the reward 'code' will refuse to run what a model wrote." ;;
    chromium) echo "chromium is missing ($2): the tests of the page are skipped." ;;
    *) echo "$1 is missing ($2)." ;;
  esac
  echo "To install it:  apt install $1   (or dnf, pacman, zypper: the same name)"
}

install() {
  package="$1"
  command -v apt-get > /dev/null 2>&1 || { missing "$package" "there is no apt-get here"; return; }
  if [ "$(id -u)" = 0 ]; then
    as_root=""
  elif sudo -n true > /dev/null 2>&1; then
    as_root="sudo -n"
  else
    missing "$package" "and installing it takes root"
    return
  fi
  echo "== apt-get install $package"
  export DEBIAN_FRONTEND=noninteractive
  get="$as_root apt-get install --yes --quiet --no-install-recommends $package"
  $get > /dev/null 2>&1 && return
  # A fresh container knows no packages yet.
  $as_root apt-get update --quiet > /dev/null 2>&1
  $get > /dev/null 2>&1 || missing "$package" "apt-get could not install it"
}

for package in "${@:-bubblewrap}"; do
  case "$package" in bubblewrap) name=bwrap ;; *) name="$package" ;; esac
  if command -v "$name" > /dev/null 2>&1; then echo "$package is installed"; else install "$package"; fi
done
