#!/bin/sh
# kubeproxy-nftables.sh ENDPOINT... gives the Service web, which has client affinity, endpoints as a sync of
# kube-proxy's nftables mode does.
set -e
service=service-SUSTUHLJ-default/web/tcp/http
{
	cat <<EOF
add table ip kube-proxy
add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority dstnat ; }
add chain ip kube-proxy nat-output { type nat hook output priority -100 ; }
add chain ip kube-proxy nat-postrouting { type nat hook postrouting priority srcnat ; }
add chain ip kube-proxy services
add chain ip kube-proxy $service
flush chain ip kube-proxy nat-prerouting
flush chain ip kube-proxy nat-output
flush chain ip kube-proxy nat-postrouting
flush chain ip kube-proxy services
flush chain ip kube-proxy $service
add rule ip kube-proxy nat-prerouting jump services
add rule ip kube-proxy nat-output jump services
add rule ip kube-proxy nat-postrouting mark and 0x4000 != 0 mark set mark xor 0x4000 masquerade
add rule ip kube-proxy services ip daddr 10.96.0.10 tcp dport 80 goto $service
add rule ip kube-proxy services ip daddr 192.0.2.1 tcp dport 30080 goto $service
EOF
	n=0
	for ip; do
		name=ABCDEFG$n-default/web/tcp/http__$ip/8080
		cat <<EOF
add set ip kube-proxy affinity-$name { type ipv4_addr ; flags dynamic,timeout ; timeout 3h ; }
add chain ip kube-proxy endpoint-$name
flush chain ip kube-proxy endpoint-$name
add rule ip kube-proxy endpoint-$name update @affinity-$name { ip saddr }
add rule ip kube-proxy endpoint-$name meta l4proto tcp mark set mark or 0x4000 dnat to $ip:8080
add rule ip kube-proxy $service ip saddr @affinity-$name goto endpoint-$name
EOF
		drawn="$drawn$n : goto endpoint-$name, "
		n=$((n + 1))
	done
	echo "add rule ip kube-proxy $service numgen random mod $n vmap { ${drawn%, } }"
} | nft -f -
