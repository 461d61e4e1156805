#!/bin/sh
# The system packages that posttrain can use and pip cannot install. Installs them where it may
# (Debian and Ubuntu, as root or with a sudo that asks nothing), else says what is missing. Always
# succeeds: everything but what needs them works without.
#
#   bubblewrap   the sandbox of the reward `code`: docs/security.md

if command -v bwrap > /dev/null 2>&1; then
  echo "bubblewrap is installed"
  exit 0
fi

explain() {
  echo "bubblewrap is missing ($1): the reward 'code' will refuse to run what a model wrote."
  echo "To install it:  apt install bubblewrap   (or dnf, pacman, zypper: the same name)"
  exit 0
}

command -v apt-get > /dev/null 2>&1 || explain "there is no apt-get here"
if [ "$(id -u)" = 0 ]; then
  as_root=""
elif sudo -n true > /dev/null 2>&1; then
  as_root="sudo -n"
else
  explain "and installing it takes root"
fi

echo "== apt-get install bubblewrap"
export DEBIAN_FRONTEND=noninteractive
install="$as_root apt-get install --yes --quiet --no-install-recommends bubblewrap"
$install > /dev/null 2>&1 && exit 0
# A fresh container knows no packages yet.
$as_root apt-get update --quiet > /dev/null 2>&1
$install > /dev/null 2>&1 || explain "apt-get could not install it"
