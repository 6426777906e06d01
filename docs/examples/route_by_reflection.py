"""Call Route with nothing but the server's own description of it: HOST:PORT MODEL."""

import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

target, model = sys.argv[1:3]
with grpc.insecure_channel(target) as channel:
    server = reflection_pb2_grpc.ServerReflectionStub(channel)
    pool, known = descriptor_pool.DescriptorPool(), set()

    def ask(**question):
        """What the server says of itself."""
        request = reflection_pb2.ServerReflectionRequest(**question)
        return next(server.ServerReflectionInfo(iter([request])))

    def learn(**question):
        """Take over the files that answer `question`, those they need first."""
        for raw in ask(**question).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            if file.name not in known:
                known.add(file.name)
                for needed in file.dependency:
                    learn(file_by_filename=needed)
                pool.Add(file)

    for service in ask(list_services="").list_services_response.service:
        print(service.name)
    learn(file_containing_symbol="headway.routing.v1.Router")
    method = pool.FindServiceByName("headway.routing.v1.Router").methods_by_name["Route"]
    question, answer = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))
    route = channel.unary_unary(
        "/headway.routing.v1.Router/Route",
        request_serializer=question.SerializeToString,
        response_deserializer=answer.FromString,
    )
    found = route(question(model=model, text="Why is the sky blue?", max_tokens=64), timeout=35)
    print(json_format.MessageToJson(found, preserving_proto_field_name=True))
