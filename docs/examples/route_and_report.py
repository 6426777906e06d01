"""Route a request, send it there yourself, report what came of it: HOST:PORT MODEL [TOKEN]."""

import sys
import time

import grpc
from headway.routing.v1 import routing_pb2 as pb
from headway.routing.v1 import routing_pb2_grpc

target, model = sys.argv[1:3]
token = (("authorization", f"Bearer {sys.argv[3]}"),) if len(sys.argv) > 3 else ()
with grpc.insecure_channel(target) as channel:
    router = routing_pb2_grpc.RouterStub(channel)
    request = pb.RouteRequest(model=model, text="Why is the sky blue?", max_tokens=64)
    answer = router.Route(request, metadata=token, timeout=35)
    print(f"send it to http://{answer.endpoint.address} asking for {answer.model}")
    sent = time.monotonic()  # … forward the request here, and stream the answer to your user …
    finished = pb.Finished(outcome=pb.OUTCOME_SUCCESS, usage=pb.Usage(prompt_tokens=6, completion_tokens=42))
    finished.duration_ms = (time.monotonic() - sent) * 1000
    report = pb.Report(reservation_id=answer.reservation_id, finished=finished)
    result = router.Report(pb.ReportRequest(reports=[report]), metadata=token).results[0]
    print(pb.ReportStatus.Name(result.status))
