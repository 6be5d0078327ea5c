{{- define "dsec.labels" -}}
app.kubernetes.io/name: dsec
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "dsec.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{/* The arguments by which a process reaches the cluster. */}}
{{- define "dsec.join" -}}
{{- $nats := .Values.nats }}
{{- if $nats.enabled }}
{{- $scheme := ternary "tls" "nats" (ne $nats.tlsSecret "") }}
{{- range $n := until (int $nats.replicas) }}
- --join
- {{ printf "%s://dsec-nats-%d.dsec-nats.%s.svc:4222" $scheme $n $.Release.Namespace }}
{{- end }}
{{- if eq $scheme "nats" }}
- --plain
{{- end }}
{{- else }}
{{- range $nats.urls }}
- --join
- {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Root's capabilities, files and users are not needed. */}}
{{- define "dsec.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* The authority of the NATS servers' certificate, where credentials name it (`dsec cluster init --ca-file`). */}}
{{- define "dsec.caMount" -}}
{{- if and .Values.nats.enabled .Values.nats.tlsSecret }}
- {name: ca, mountPath: /etc/dsec/ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "dsec.caVolume" -}}
{{- if and .Values.nats.enabled .Values.nats.tlsSecret }}
- name: ca
  secret: {secretName: {{ .Values.nats.tlsSecret }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}
