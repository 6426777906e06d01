// nginx with Headway: ask the scheduler where each request shall go, send it there, and report what came of it.
// nginx.conf beside this file says how it is used; docs/nginx.md what to expect of it. Needs njs 0.7.9 or newer.

import crypto from 'crypto';

export default {route, watch, report};

const HOLD_S = 33; // how long a request may wait at the scheduler: below js_fetch_timeout
const TAIL_LENGTH = 4096; // characters of an answer's end: where its usage is
const GOING_AWAY = ['SHUTTING_DOWN', 'STANDBY'];

// js_content: choose, then let nginx proxy. While no scheduler answers, the fallback upstream serves.
async function route(r) {
    if (r.method !== 'POST') {
        return r.internalRedirect('@headway_fallback');
    }
    let body, request;
    try {
        body = JSON.parse(r.requestText);
        request = wanted(r, body);
    } catch (e) {
        return refuse(r, 400, 'INVALID_ARGUMENT', 'the body is not valid JSON, or not as the API has it');
    }
    let answer, told;
    try {
        answer = await ask(r, '/v1/route', request);
        told = await answer.json();
    } catch (e) {
        r.error(`headway: no scheduler answers: ${e.message}`);
        return failOpen(r);
    }
    if (answer.status === 200) {
        return proxy(r, body, told);
    }
    const reason = answer.headers.get('x-headway-reason') || '';
    if (GOING_AWAY.includes(reason) || !told.error) {
        return failOpen(r);
    }
    const after = answer.headers.get('retry-after');
    if (after) {
        r.headersOut['Retry-After'] = after;
    }
    refuse(r, answer.status, reason, told.error.message);
}

// js_body_filter: note when the first byte of the answer came, and keep its end.
function watch(r, data, flags) {
    if (data.length) {
        if (!r.variables.headway_first) {
            r.variables.headway_first = String(Date.now());
        }
        const tail = r.variables.headway_tail + data.toString();
        r.variables.headway_tail = tail.slice(-TAIL_LENGTH);
    }
    r.sendBuffer(data, flags);
}

// post_action: runs when the request has ended, however it ended.
async function report(r) {
    const id = r.variables.headway_reservation;
    if (id) {
        const served = lastOf(r.variables.upstream_addr);
        const reports = [];
        if (served && served !== r.variables.headway_endpoint) {
            reports.push({reservationId: id, servedBy: {endpoint: served}});
        }
        reports.push({reservationId: id, finished: finished(r)});
        try {
            await ask(r, '/v1/report', {reports});
        } catch (e) {
            r.error(`headway: not reported, it ends by expiry: ${e.message}`);
        }
    }
    r.return(204);
}

function ask(r, path, message) {
    const headers = {'Content-Type': 'application/json', 'X-Headway-Timeout-S': String(HOLD_S)};
    if (process.env.HEADWAY_TOKEN) {
        headers.Authorization = `Bearer ${process.env.HEADWAY_TOKEN}`;
    }
    return ngx.fetch(r.variables.headway_scheduler + path, {method: 'POST', headers, body: JSON.stringify(message)});
}

// The RouteRequest of an OpenAI body.
function wanted(r, body) {
    const request = {tenant: r.variables.headway_tenant, model: String(body.model || '')};
    const limit = body.max_completion_tokens || body.max_tokens;
    if (limit) {
        request.maxTokens = limit;
    }
    if (Array.isArray(body.messages)) {
        request.chat = {messages: body.messages.map(message), tools: body.tools ? JSON.stringify(body.tools) : ''};
    } else {
        const prompt = body.prompt !== undefined ? body.prompt : body.input;
        if (typeof prompt === 'string') {
            request.text = prompt;
        } else if (Array.isArray(prompt) && prompt.every(Number.isInteger)) {
            request.tokens = {ids: prompt};
        } else if (Array.isArray(prompt) && prompt.every((each) => typeof each === 'string')) {
            request.text = prompt.join('\n');
        }
    }
    return request;
}

function message(each) {
    const content = Array.isArray(each.content) ? each.content.map(part).join('') : String(each.content || '');
    return {role: String(each.role || ''), content, name: String(each.name || '')};
}

// An image counts by its digest: the same one is the same prefix.
function part(each) {
    if (each.type === 'text') {
        return String(each.text || '');
    }
    const digest = crypto.createHash('sha256').update(JSON.stringify(each)).digest('hex').slice(0, 32);
    return `<${each.type}:${digest}>`;
}

function proxy(r, body, told) {
    const v = r.variables;
    v.headway_reservation = told.reservationId;
    v.headway_endpoint = told.endpoint.address;
    // Names the engine's data-parallel rank, where several share an address: a fallback must be the same rank.
    const rank = (told.headers || {})['x-data-parallel-rank'] || '';
    v.headway_rank = rank;
    const alike = (told.fallbacks || []).filter((each) => !rank || String(each.dpRank || 0) === rank);
    const fallbacks = alike.map((each) => each.address);
    v.headway_second = fallbacks[0] || told.endpoint.address;
    v.headway_third = fallbacks[1] || v.headway_second;
    v.headway_body = forwarded(r, body, told);
    v.headway_tail = '';
    v.headway_sent = String(Date.now());
    r.internalRedirect('@headway_engine');
}

// The client's own bytes, unless an alias or the tenant's salt changes them.
function forwarded(r, body, told) {
    if (body.model === told.model && !told.cacheSalt) {
        return r.requestText;
    }
    body.model = told.model;
    if (told.cacheSalt) {
        body.cache_salt = told.cacheSalt;
    }
    return JSON.stringify(body);
}

function failOpen(r) {
    r.internalRedirect('@headway_fallback');
}

function refuse(r, status, reason, text) {
    const kinds = {400: 'invalid_request_error', 404: 'not_found_error', 429: 'rate_limit_error'};
    const code = reason === 'UNKNOWN_MODEL' ? 'model_not_found' : reason.toLowerCase();
    r.headersOut['Content-Type'] = 'application/json';
    r.headersOut['X-Headway-Reason'] = reason;
    const error = {message: text, type: kinds[status] || 'server_error', param: null, code};
    r.return(status, JSON.stringify({error}));
}

function finished(r) {
    const v = r.variables;
    const told = {outcome: outcome(r), httpStatus: Number(lastOf(v.upstream_status)) || 0};
    told.durationMs = Date.now() - Number(v.headway_sent);
    if (told.outcome === 'OUTCOME_SUCCESS' && v.headway_first && lastOf(v.upstream_http_content_type).startsWith('text/event-stream')) {
        told.ttftMs = Number(v.headway_first) - Number(v.headway_sent);
    }
    const usage = usageIn(v.headway_tail);
    if (usage) {
        told.usage = {promptTokens: usage.prompt_tokens, completionTokens: usage.completion_tokens};
        if (usage.prompt_tokens_details && usage.prompt_tokens_details.cached_tokens !== undefined) {
            told.usage.cachedTokens = usage.prompt_tokens_details.cached_tokens;
        }
    }
    return told;
}

// A client that leaves after the end of the stream (`[DONE]`) has had its answer. One that broke off before is a
// cancelled one: nginx does not tell whether it was the client that left or the engine that died.
function outcome(r) {
    const v = r.variables;
    const upstream = Number(lastOf(v.upstream_status)) || 0;
    if (!v.headway_first) {
        if (v.status === '499') {
            return 'OUTCOME_CANCELLED';
        }
        if (v.status === '504' && upstream === 504) {
            return 'OUTCOME_TIMEOUT';
        }
        if (v.status === '502' && upstream === 502) {
            return 'OUTCOME_CONNECT_ERROR';
        }
    }
    if (upstream >= 400) {
        return upstream >= 500 ? 'OUTCOME_SERVER_ERROR' : 'OUTCOME_CLIENT_ERROR';
    }
    return v.request_completion || v.headway_tail.includes('[DONE]') ? 'OUTCOME_SUCCESS' : 'OUTCOME_CANCELLED';
}

function usageIn(tail) {
    const at = tail ? tail.lastIndexOf('"usage"') : -1;
    const found = at < 0 ? null : /^"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})/.exec(tail.slice(at));
    return found ? JSON.parse(found[1]) : null;
}

// nginx lists every try: "a, b : c".
function lastOf(list) {
    const all = (list || '').split(/\s*,\s*|\s+:\s+/);
    return all[all.length - 1];
}
