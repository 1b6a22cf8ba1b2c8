{{/* The documents of a file, as a list in the field list. */}}
{{- define "nodeproxy.documents" -}}
{{- $list := list -}}
{{- range splitList "\n---\n" (.root.Files.Get .file) -}}
{{- $object := fromYaml . -}}
{{- if $object.metadata.namespace -}}
{{- $_ := set $object.metadata "namespace" $.root.Release.Namespace -}}
{{- end -}}
{{- range $object.subjects -}}
{{- $_ := set . "namespace" $.root.Release.Namespace -}}
{{- end -}}
{{- $list = append $list $object -}}
{{- end -}}
{{- dict "list" $list | toYaml -}}
{{- end -}}

{{/* The configuration file. */}}
{{- define "nodeproxy.config" -}}
{{- $config := fromYaml (.Files.Get "files/base/config.yaml") -}}
{{- if .Values.monitoring.enabled -}}
{{- $config = fromYaml (.Files.Get "files/prometheus/config.yaml") -}}
{{- end -}}
{{- $_ := set $config "mode" .Values.mode -}}
{{- $_ := unset $config "clusterCIDR" -}}
{{- if not (or .Values.kubeadm .Values.config.clusterCIDR (ne "ClusterCIDR" (default "ClusterCIDR" .Values.config.detectLocalMode))) -}}
{{- fail "config.clusterCIDR is required, the range of the pods' addresses, unless kubeadm is true or config.detectLocalMode is not ClusterCIDR" -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{/* The host and the port of an address as in healthzBindAddress: IP:PORT, or an IP alone. */}}
{{- define "nodeproxy.listens" -}}
{{- $host := default "" .address -}}
{{- $port := toString .port -}}
{{- if regexMatch "^(\\[.*\\]|[^:]*):[0-9]+$" $host -}}
{{- $port = regexFind "[0-9]+$" $host -}}
{{- $host = trimSuffix (print ":" $port) $host -}}
{{- end -}}
{{- dict "host" ($host | trimPrefix "[" | trimSuffix "]") "port" (int $port) | toYaml -}}
{{- end -}}
