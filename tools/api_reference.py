"""Write the API's reference, docs/reference, from the protos and their comments.

`generate` writes the pages; `check` fails, naming them, when they are not what the protos make.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import google.rpc
import grpc_tools
from google.protobuf import descriptor_pb2 as pb

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PAGES = ROOT / "docs" / "reference"
WHEEL = Path(next(iter(google.rpc.__path__))).parent.parent
SERVICES = ("routing", "telemetry", "admin", "fleet")
MESSAGE, FIELD, NESTED, ENUM, SERVICE, FILE_ENUM = 4, 2, 3, 4, 6, 5
METHOD = VALUE = 2
SYNTAX = 12
SCALARS = {
    number: name.removeprefix("TYPE_").lower() for name, number in pb.FieldDescriptorProto.Type.items()
}  # fmt: skip


def described() -> pb.FileDescriptorSet:
    """The protos with their comments."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "set.binpb"
        command = [
            sys.executable, "-m", "grpc_tools.protoc",
            f"-I{PROTOS}", f"-I{WHEEL}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            "--include_source_info", f"--descriptor_set_out={out}",
            *(f"headway/{name}/v1/{name}.proto" for name in SERVICES),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return pb.FileDescriptorSet.FromString(out.read_bytes())


class Page:
    """One file's page."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self._file = file
        self._comments = {tuple(each.path): each for each in file.source_code_info.location}

    def text(self) -> str:
        """All of it."""
        return "\n".join(self._lines()).replace("\n\n\n", "\n\n") + "\n"

    def _lines(self) -> Iterator[str]:
        file = self._file
        head = self._comments[(SYNTAX,)].leading_comments or "".join(
            self._comments[(SYNTAX,)].leading_detached_comments
        )
        title, _, rest = _plain(head).partition(": ")
        yield f"# API: {title}"
        yield ""
        yield f"{rest[:1].upper()}{rest[1:]}"
        yield ""
        yield f"Package `{file.package}`. Generated from `protos/{file.name}` by `make protos`."
        for number, service in enumerate(file.service):
            yield from self._service(service, (SERVICE, number))
        for number, message in enumerate(file.message_type):
            yield from self._message(message, message.name, (MESSAGE, number))
        for number, enum in enumerate(file.enum_type):
            yield from self._enum(enum, enum.name, (FILE_ENUM, number))

    def _service(self, service: pb.ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from ("", f"## Service {service.name}", "", self._comment(path), "")
        yield from ("| method | takes | answers | |", "|---|---|---|---|")
        for number, method in enumerate(service.method):
            takes = self._stream(method.client_streaming) + self._type(method.input_type)
            answers = self._stream(method.server_streaming) + self._type(method.output_type)
            yield f"| `{method.name}` | {takes} | {answers} | {self._cell((*path, METHOD, number))} |"

    def _message(self, message: pb.DescriptorProto, name: str, path: tuple[int, ...]) -> Iterator[str]:
        yield from ("", f"## {name}", "", self._comment(path), "")
        if message.field:
            yield from ("| field | type | |", "|---|---|---|")
        else:
            yield "No fields."
        maps = {each.name: each for each in message.nested_type if each.options.map_entry}
        for number, field in enumerate(message.field):
            type_ = self._field_type(field, maps)
            yield f"| `{field.name}` = {field.number} | {type_} | {self._cell((*path, FIELD, number))} |"
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, f"{name}.{nested.name}", (*path, NESTED, number))
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, f"{name}.{enum.name}", (*path, ENUM, number))

    def _enum(self, enum: pb.EnumDescriptorProto, name: str, path: tuple[int, ...]) -> Iterator[str]:
        yield from ("", f"## {name}", "", self._comment(path), "", "| value | |", "|---|---|")
        for number, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {self._cell((*path, VALUE, number))} |"

    def _field_type(self, field: pb.FieldDescriptorProto, maps: dict[str, pb.DescriptorProto]) -> str:
        short = field.type_name.rpartition(".")[2]
        if short in maps:
            key, value = maps[short].field
            return f"map of {SCALARS[key.type]} to {self._field_type(value, {})}"
        kind = self._type(field.type_name) if field.type_name else SCALARS[field.type]
        if field.label == pb.FieldDescriptorProto.LABEL_REPEATED:
            return f"list of {kind}"
        if field.proto3_optional:
            return f"{kind}, or unset"
        if field.HasField("oneof_index"):
            return f"{kind}, one of several"
        return kind

    def _type(self, name: str) -> str:
        package, _, short = name.removeprefix(".").rpartition(".")
        if not package.startswith(self._file.package):
            for other in SERVICES:
                if package == f"headway.{other}.v1":
                    return f"[{short}]({other}.md#{short.lower()})"
            return f"`{name.removeprefix('.')}`"
        inner = f"{package}.{short}".removeprefix(f"{self._file.package}.")
        return f"[{inner}](#{inner.lower().replace('.', '')})"

    @staticmethod
    def _stream(streams: bool) -> str:
        return "stream of " if streams else ""

    def _comment(self, path: tuple[int, ...]) -> str:
        found = self._comments.get(path)
        return "" if found is None else _plain(found.leading_comments or found.trailing_comments)

    def _cell(self, path: tuple[int, ...]) -> str:
        return self._comment(path).replace("\n\n", "<br>").replace("|", "\\|")


def _plain(comment: str) -> str:
    """A comment's paragraphs, each on one line."""
    paragraphs = "\n".join(line.strip() for line in comment.strip().splitlines()).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


def pages() -> dict[str, str]:
    """The text of each page by its file's name."""
    files = {file.name: file for file in described().file}
    return {f"{name}.md": Page(files[f"headway/{name}/v1/{name}.proto"]).text() for name in SERVICES}


def main(verb: str) -> None:
    """Dispatch the two verbs."""
    made = pages()
    if verb == "generate":
        PAGES.mkdir(exist_ok=True)
        for name, text in made.items():
            (PAGES / name).write_text(text)
    elif verb == "check":
        stale = [n for n, text in made.items() if not (PAGES / n).is_file() or (PAGES / n).read_text() != text]
        if stale:
            sys.exit("docs/reference is stale; run `make protos`:\n  " + "\n  ".join(stale))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
