#!/bin/sh
# kubeproxy-ipvs.sh ENDPOINT... brings a node of the site to the state that kube-proxy's ipvs mode has for the
# Service web and --cluster-cidr 10.1.0.0/16: it adds what is missing and flushes its own chains. It has the
# same sets, chains, rules and order, including sets and chains that only other Services use.
#
# The timeout of established connections is two minutes instead of 15. When two processors handle the
# last packets of a connection, IPVS can mark it as closed but leave it the timer of an established
# one (ip_vs_conn_put reads the timeout before it sets the timer), and drains last until then.
set -e
sysctl() { echo $2 > /proc/sys/net/ipv4/$1; }
sysctl vs/conntrack 1; sysctl vs/conn_reuse_mode 0; sysctl vs/expire_nodest_conn 1; sysctl vs/expire_quiescent_template 1; sysctl ip_forward 1
ip link add kube-ipvs0 type dummy 2>/dev/null || true
ip addr replace 10.96.0.10/32 dev kube-ipvs0
ipvsadm --set 120 120 300
for server in 10.96.0.10:80 192.0.2.1:30080 10.1.0.1:30080; do
	ipvsadm -A -t $server -s rr 2>/dev/null || true
	for ip in 10.1.0.2 10.1.0.3 10.1.0.4; do
		case " $* " in
		*" $ip "*) ipvsadm -a -t $server -r $ip:8080 -m -w 1 2>/dev/null || ipvsadm -e -t $server -r $ip:8080 -m -w 1 ;;
		*) ipvsadm -d -t $server -r $ip:8080 2>/dev/null || true ;;
		esac
	done
done

ipset restore -exist <<EOF
create KUBE-LOOP-BACK hash:ip,port,ip family inet hashsize 1024 maxelem 65536
create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-EXTERNAL-IP hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-EXTERNAL-IP-LOCAL hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-FW hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-LOCAL hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-SOURCE-IP hash:ip,port,ip family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-SOURCE-CIDR hash:ip,port,net family inet hashsize 1024 maxelem 65536
create KUBE-NODE-PORT-TCP bitmap:port range 0-65535
create KUBE-NODE-PORT-LOCAL-TCP bitmap:port range 0-65535
create KUBE-NODE-PORT-UDP bitmap:port range 0-65535
create KUBE-NODE-PORT-LOCAL-UDP bitmap:port range 0-65535
create KUBE-NODE-PORT-SCTP-HASH hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-NODE-PORT-LOCAL-SCTP-HASH hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-HEALTH-CHECK-NODE-PORT bitmap:port range 0-65535
create KUBE-IPVS-IPS hash:ip family inet hashsize 1024 maxelem 65536
create KUBE-6-CLUSTER-IP hash:ip,port family inet6 hashsize 1024 maxelem 65536
add KUBE-CLUSTER-IP 10.96.0.10,tcp:80
add KUBE-LOOP-BACK 10.1.0.2,tcp:8080,10.1.0.2
add KUBE-NODE-PORT-TCP 30080
add KUBE-IPVS-IPS 10.96.0.10
EOF

iptables-restore --noflush <<EOF
*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*nat
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A KUBE-SERVICES -m comment --comment "Kubernetes service lb portal" -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-SERVICES ! -s 10.1.0.0/16 -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m comment --comment "Kubernetes service external ip + port for masquerade and filter purpose" -m set --match-set KUBE-EXTERNAL-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m comment --comment "Kubernetes service external ip + port for masquerade and filter purpose" -m set --match-set KUBE-EXTERNAL-IP dst,dst -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT
-A KUBE-LOAD-BALANCER -m comment --comment "Kubernetes service load balancer ip + port with externalTrafficPolicy=local" -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port with externalTrafficPolicy=local" -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -j RETURN
-A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port for masquerade purpose" -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:KUBE-PROXY-CANARY - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port" -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-PROXY-FIREWALL -m comment --comment "Kubernetes service load balancer ip + port for load balancer with sourceRange" -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
-A KUBE-SOURCE-RANGES-FIREWALL -m comment --comment "Kubernetes service load balancer ip + port + source cidr for packet filter" -m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
-A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
COMMIT
EOF

ip6tables-restore --noflush <<EOF
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-6-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
*filter
:KUBE-IPVS-FILTER - [0:0]
COMMIT
EOF

# hook PROGRAM TABLE CHAIN RULE... inserts a rule if it is missing.
hook() {
	program=$1 table=$2 chain=$3
	shift 3
	$program -w -t $table -C $chain "$@" 2>/dev/null || $program -w -t $table -I $chain "$@"
}
hook iptables nat PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
hook iptables nat OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
hook iptables nat POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
hook iptables filter INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
hook iptables filter INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
hook iptables filter INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
hook iptables filter FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
hook iptables filter FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
hook iptables filter OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
hook ip6tables nat PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
hook ip6tables filter INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
