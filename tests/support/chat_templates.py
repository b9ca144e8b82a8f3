"""Chat templates with the constructs of the published families, in our own words, each with a small tokenizer of its kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tokenizers import AddedToken

from tests.support import vocabularies

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Tools: " + tools | tojson(indent=4) }}{%- endif %}
{{- "Written until: May 2024\\n" ~ "Now: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- raise_exception("This template takes no tool calls.") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}\
{% set loop_messages = messages[1:] %}{% set told = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set told = false %}{% endif %}\
{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Users and assistants must take turns.') }}\
{% endif %}\
{% if loop.index0 == 0 and told != false %}\
{% set content = '<<SYS>>\\n' + told + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After a system message, user and assistant must take turns: " + message["role"]) }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if message == user_messages[-1] and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""

HERMES = """\
{%- macro header(role, name=none) -%}
<|im_start|>{{ role }}{% if name %}{{ ' name=' + name }}{% endif %}

{% endmacro -%}
{{- bos_token }}
{%- for message in messages -%}
    {{- header(message.role, message.name) -}}
    {%- generation -%}{{- message.content ~ '<|im_end|>' -}}{%- endgeneration -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- header('assistant') -}}{%- endif -%}"""

DISTILL = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(system_prompt='', has_answer=false) %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}\
{{bos_token}}{{ns.system_prompt}}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none %}\
{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}\
{%- endfor -%}\
{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""

QWEN = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a careful helper.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

PHI = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<|end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""


SMOLLM3 = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
  {%- set told = messages[0].content -%}
  {%- if "/no_think" in told -%}{%- set mode = "/no_think" -%}{%- endif -%}
  {%- set own = told.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\\nMode: " + mode + "\\n\\n" -}}
{%- if "/plain" in told -%}{{- own.replace("/plain", "") -}}
{%- else -%}{{- (own or "You are small.") + "\\n\\n" -}}{%- endif -%}
{%- if xml_tools or python_tools -%}
  {%- set ns = namespace(text="These functions are within <tools></tools>:\\n<tools>\\n") -%}
  {%- for tool in xml_tools[:] -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" -%}{%- endfor -%}
  {{- ns.text + "</tools>\\nCall one so: <tool_call>{\\"name\\": ..., \\"arguments\\": ...}</tool_call>\\n" -}}
{%- endif -%}
{%- set unthought = "<think>\\n\\n</think>\\n" if mode == "/no_think" else "" -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {{- "<|im_start|>assistant\\n" + unthought + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\\n" + unthought }}{%- endif -%}"""

EXAONE4 = """\
{%- set marks = {'user': '[|user|]\\n', 'assistant': '[|assistant|]\\n', 'system': '[|system|]\\n', 'tool': '[|tool|]\\n'} %}
{%- set end = '[|endofturn|]\\n' %}
{%- macro offer(tools) %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}<tool>{{- tool | tojson(ensure_ascii=False) | safe }}{{- "</tool>\\n" }}{%- endfor %}
    {{- "Write calls as <tool_call>{...}</tool_call>." }}
{%- endmacro %}
{%- for i in range(messages | length) %}
    {%- set msg = messages[i] %}
    {%- if msg.role not in marks %}{{- raise_exception('No such role: ' ~ msg.role) }}{%- endif %}
    {%- if i == 0 and msg.role == 'system' %}
        {{- marks['system'] }}{{- msg.content }}
        {%- if tools is defined and tools %}{{- "\\n\\n" }}{{- offer(tools) }}{%- endif %}
        {{- end -}}
        {%- continue %}
    {%- elif i == 0 and tools is defined and tools %}
        {{- marks['system'] }}{{- offer(tools) }}{{- end -}}
    {%- endif %}
    {%- if msg.role == 'assistant' %}
        {{- marks['assistant'] + "<think>\\n\\n</think>\\n\\n" + msg.content.split('</think>')[-1].strip() }}
        {%- for call in msg.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- "<tool_call>" }}{"name": "{{- call.name }}", "arguments": {{ call.arguments | tojson }}}{{- "</tool_call>\\n" }}
        {%- endfor %}
        {{- end -}}
    {%- elif msg.role == "tool" %}
        {%- if messages[i - 1].role != "tool" %}{{- marks['tool'] }}{%- endif %}
        {{- "<tool_result>" }}{"result": {{ msg.content | tojson(ensure_ascii=False) | safe }}}{{- "</tool_result>" }}
        {%- if loop.last or messages[i + 1].role != "tool" %}{{- end -}}{%- else %}{{- "\\n" }}{%- endif %}
    {%- else %}
        {{- marks[msg.role] }}{{- msg.content }}{{- end -}}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- marks['assistant'] }}
    {{- "<think>\\n" if enable_thinking is defined and enable_thinking is true else "<think>\\n\\n</think>\\n\\n" }}
{%- endif %}"""

GRANITE = """\
{%- if tools and not available_tools -%}{%- set available_tools = tools -%}{%- endif -%}
{%- if messages[0]['role'] == 'system' %}
     {%- set told = messages[0]['content'] %}
     {%- set rest = messages[1:] %}
 {%- else %}
     {%- set told = "You are a stone." + (" Call tools with <|tool_call|> and a list." if available_tools else "") %}
     {%- if thinking %}{%- set told = told + " Think within <think></think>." %}{%- endif %}
     {%- if 'citations' in controls and documents %}{%- set told = told + " Cite." %}{%- endif %}
     {%- set rest = messages %}
 {%- endif %}
 {{- '<|start_of_role|>system<|end_of_role|>' + told + '<|end_of_text|>\\n' }}
 {%- if available_tools %}
     {{- '<|start_of_role|>available_tools<|end_of_role|>' }}
     {{- available_tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
 {%- endif %}
 {%- for message in rest %}
     {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
     {%- if loop.last and add_generation_prompt %}
         {{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson()}}{%- endif %}
         {{- '<|end_of_role|>' }}
     {%- endif %}
 {%- endfor %}"""

PHI4_MINI = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}\
{% if 'tools' in message and message['tools'] is not none %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}\
{{ '<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt else eos_token }}"""


HARMONY = """\
{%- macro kind_of(spec) -%}
    {%- if spec.type == "array" -%}{{- kind_of(spec['items']) + "[]" if spec['items'] else "any[]" }}
    {%- elif spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' }}
    {%- elif spec.type == "integer" -%}{{- "number" }}
    {%- else -%}{{- spec.type or "any" }}{%- endif -%}
{%- endmacro -%}
{%- macro offer(tools) -%}
    {{- "namespace functions {\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\n" + "type " + tool.name + " = (_: {\n" }}
        {%- for name, spec in tool.parameters.properties.items() %}
            {{- name + ("?" if name not in (tool.parameters.required or []) else "") + ": " + kind_of(spec) + ",\n" }}
        {%- endfor %}
        {{- "}) => any;\n" }}
    {%- endfor %}
    {{- "}" }}
{%- endmacro -%}
{%- macro head() -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "You are small.\nToday: " + strftime_now("%Y-%m-%d") + "\nEffort: " + reasoning_effort }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- head() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set told = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set told = none %}{%- set rest = messages %}
{%- endif %}
{%- if told is not none or tools %}
    {{- "<|start|>developer<|message|>" }}{%- if told is not none %}{{- "# Told\n\n" + told + "\n\n" }}{%- endif %}
    {%- if tools -%}{{- offer(tools) }}{%- endif -%}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' and "tool_calls" in message -%}
        {%- set later = namespace(found=false) %}
        {%- for other in rest[loop.index:] %}
            {%- if other.role == 'assistant' and "tool_calls" not in other %}{%- set later.found = true %}{%- endif %}
        {%- endfor %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("A message with calls has content or thinking, not both.") }}
        {%- elif (message.content or message.thinking) and not later.found %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson }}{{- "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- set last.name = none %}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}{{- raise_exception("A result comes after a call.") }}{%- endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}"""


class Family(NamedTuple):
    """A template, the kind of its tokenizer (`vocabularies.FAMILIES`), and further tokens. unmarked: control tokens that the
    published file does not mark as special. words: tokens with text that the template writes or reads."""

    template: str
    vocabulary: str
    control: Sequence[str] = ()
    has_rstrip: bool = False
    unmarked: Sequence[str] = ()
    words: Sequence[str] = ()


FAMILIES: Final = {
    "chatml": Family(CHATML, "smollm"),
    "llama3": Family(LLAMA3, "llama3", ("<|eom_id|>", "<|python_tag|>")),
    "llama2": Family(LLAMA2, "llama2_legacy"),
    "mistral": Family(MISTRAL, "metaspace", ("[INST]", "[/INST]", "[TOOL_CALLS]")),
    "hermes": Family(HERMES, "llama3", ("<|im_start|>", "<|im_end|>")),
    "distill": Family(
        DISTILL,
        "llama3",
        ("<｜end▁of▁sentence｜>",),
        unmarked=("<｜User｜>", "<｜Assistant｜>", "<|EOT|>"),
        words=("<think>", "</think>"),
    ),
    "qwen": Family(QWEN, "qwen"),
    "smollm3": Family(SMOLLM3, "smollm", words=("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "exaone4": Family(
        EXAONE4,
        "qwen",
        ("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]", "[|endofturn|]"),
        words=("<think>", "</think>"),
    ),
    "granite": Family(
        GRANITE,
        "smollm",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        words=("<think>", "</think>"),
    ),
    "phi4_mini": Family(
        PHI4_MINI,
        "smollm",
        (
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|end|>",
            "<|tool|>",
            "<|/tool|>",
            "<|tool_call|>",
            "<|/tool_call|>",
            "<|tool_response|>",
        ),
    ),
    "harmony": Family(
        HARMONY,
        "llama3",
        (*("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),),
    ),
    "phi": Family(PHI, "metaspace", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), has_rstrip=True),
}


def make_chat_model(name: str, folder: Path) -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers reads them."""
    family = FAMILIES[name]
    tokenizer, config = vocabularies.FAMILIES[family.vocabulary]()
    tokenizer.add_special_tokens(vocabularies.special(*family.control, rstrip=family.has_rstrip))
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in (*family.unmarked, *family.words)])
    vocabularies.write_folder(folder, tokenizer, config)
    (folder / "chat_template.jinja").write_text(family.template)
    return folder
