#!/bin/sh
# kubeproxy-iptables.sh ENDPOINT... gives the Service web, which has client affinity, endpoints as a sync of
# kube-proxy's iptables mode does. A Service that was deleted has left a chain.
set -e

# chain ENDPOINT prints the name of its chain, which is a hash.
chain() {
	case $1 in
	10.1.0.2) echo KUBE-SEP-IMFC5XQKDZMFROSF ;;
	10.1.0.3) echo KUBE-SEP-KWIA54J3D4XB7XP3 ;;
	*) echo KUBE-SEP-THIRDTHIRDTHIRD ;;
	esac
}

{
	cat <<EOF
*filter
:KUBE-SERVICES - [0:0]
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
COMMIT
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-EXT-CDGGSHYLG3RE2FKL - [0:0]
:KUBE-SVC-CDGGSHYLG3RE2FKL - [0:0]
:KUBE-SVC-OLDOLDOLDOLDOLDO - [0:0]
EOF
	for ip; do
		echo ":$(chain $ip) - [0:0]"
	done
	cat <<EOF
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "default/web:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-CDGGSHYLG3RE2FKL
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-NODEPORTS -p tcp -m comment --comment default/web:http -m tcp --dport 30080 -j KUBE-EXT-CDGGSHYLG3RE2FKL
-A KUBE-EXT-CDGGSHYLG3RE2FKL -j KUBE-MARK-MASQ
-A KUBE-EXT-CDGGSHYLG3RE2FKL -j KUBE-SVC-CDGGSHYLG3RE2FKL
-A KUBE-SVC-CDGGSHYLG3RE2FKL -m comment --comment "default/web:http cluster IP" -j KUBE-MARK-MASQ
EOF
	for ip; do
		echo "-A KUBE-SVC-CDGGSHYLG3RE2FKL -m recent --rcheck --seconds 10800 --reap --name $(chain $ip) --mask 255.255.255.255 --rsource -j $(chain $ip)"
	done
	left=$#
	for ip; do
		draw="-m statistic --mode random --probability 0.$((10000000000 / left - 1))"
		[ $left -gt 1 ] || draw=
		left=$((left - 1))
		echo "-A KUBE-SVC-CDGGSHYLG3RE2FKL -m comment --comment \"default/web:http -> $ip:8080\" $draw -j $(chain $ip)"
		echo "-A $(chain $ip) -p tcp -m comment --comment default/web:http -m recent --set --name $(chain $ip) --mask 255.255.255.255 --rsource -m tcp -j DNAT --to-destination $ip:8080"
	done
	echo COMMIT
} | iptables-restore -w 10 --noflush

# hook TABLE CHAIN RULE... inserts a rule if it is missing.
hook() {
	table=$1 chain=$2
	shift 2
	iptables -w 10 -t $table -C $chain "$@" 2>/dev/null || iptables -w 10 -t $table -I $chain "$@"
}
hook filter FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
hook filter OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
hook nat PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
hook nat OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
hook nat POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
