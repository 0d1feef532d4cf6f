"""How the page looks, in light and dark, and the few lines of script that show values under the pointer.

Colours are those of Okabe and Ito; yellow, which vanishes on paper, is used on dark ground alone. Without
scripts nothing is missing but those values.
"""

from __future__ import annotations

import base64
import hashlib

CSS = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f9;--ink:#1b1f24;--soft:#5b636e;--rule:#dcdfe4;
--blue:#0072B2;--sky:#0072B2;--green:#009E73;--orange:#D55E00;--red:#D55E00;--purple:#CC79A7;--mark:#E69F00;
--raw:#a9b0ba}
@media(prefers-color-scheme:dark){:root{--paper:#101317;--card:#181c22;--ink:#d8dce2;--soft:#8a8f98;
--rule:#2b3038;--blue:#56B4E9;--sky:#56B4E9;--green:#009E73;--orange:#E69F00;--red:#D55E00;--mark:#F0E442;
--raw:#6a717c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.5rem 1.25rem 4rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.55rem;margin:.6rem 0 .1rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:2.4rem 0 .7rem;padding-bottom:.3rem;border-bottom:1px solid var(--rule)}
h3{font-size:.95rem;margin:1.2rem 0 .4rem}
h3 small{font-weight:400;color:var(--soft)}
p{margin:.3rem 0}
.soft,small{color:var(--soft)}
.state{display:inline-block;padding:.12rem .65rem;border-radius:.3rem;font-weight:700;color:#000;
background:var(--raw)}
.state.good{background:#009E73;color:#000}.state.blue{background:#0072B2;color:#fff}.state.dead{background:#D55E00;
color:#fff}
.state.away{background:#F0E442}.state.busy{background:#56B4E9}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(7.4rem,1fr));gap:.6rem;
margin:1.1rem 0 .4rem}
.facts div{background:var(--card);border-radius:.5rem;padding:.55rem .8rem;min-width:0}
.facts b{display:block;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere}
.facts span{color:var(--soft);font-size:.8rem}
.facts small{display:block;font-size:.8rem;font-variant-numeric:tabular-nums}
.alarm{border-left:.3rem solid var(--mark);background:var(--card);padding:.5rem .9rem;margin:.7rem 0;
border-radius:.2rem}
.crash{border-left:.3rem solid var(--red);background:var(--card);padding:.8rem 1.1rem;border-radius:.2rem}
.crash dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem .9rem;margin:.6rem 0}
.crash dt{font-weight:700;color:var(--orange)}.crash dd{margin:0}
.error{color:var(--red);font-weight:700;overflow-wrap:anywhere}
pre{background:var(--card);padding:.8rem 1rem;border-radius:.5rem;overflow:auto;max-height:32rem;
margin:.5rem 0;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;tab-size:8}
.crash pre{background:var(--paper)}
pre .own{color:var(--orange);font-weight:700}pre .away{color:var(--soft)}pre .bad{color:var(--red);
font-weight:700}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr));gap:1.1rem 1.6rem}
figure{margin:0;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:.2rem .9rem;align-items:baseline}
.legend{color:var(--soft);font-size:.85rem;display:flex;flex-wrap:wrap;gap:0 .9rem;
font-variant-numeric:tabular-nums}
.key{display:inline-block;width:.9rem;height:.2rem;border-radius:.1rem;vertical-align:.25em;
background:currentColor}
figure p{font-size:.8rem;color:var(--soft);min-height:1.3em;margin:.1rem 0 0;
font-variant-numeric:tabular-nums}
.values:not(:empty)+.help{display:none}
svg{width:100%;height:auto;display:block}
.grid{stroke:var(--rule);stroke-width:1}.tick{fill:var(--soft);font-size:11px;font-family:inherit}
.curve{fill:none;stroke:currentColor;stroke-width:1.6;stroke-linejoin:round}.thin{stroke-width:1}
.raw{color:var(--raw)}.curve.raw{stroke-width:1}.main{color:var(--orange)}.good{color:var(--green)}
.second{color:var(--sky)}.third{color:var(--purple)}
.mark,.bar{fill:currentColor}.gap{stroke:var(--red);stroke-width:1.4;fill:none}
.cursor{stroke:var(--soft);stroke-dasharray:2 3;visibility:hidden}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.9rem}
th{text-align:left;font-weight:600;color:var(--soft);font-size:.8rem;padding:.25rem .7rem .25rem 0;
border-bottom:1px solid var(--rule);white-space:nowrap}
td{padding:.28rem .7rem .28rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}td.code{font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace;
overflow-wrap:anywhere}
tr.bad td{color:var(--red)}tr.warn td:first-child,
tr.changed td:first-child{box-shadow:inset .2rem 0 var(--mark);
padding-left:.6rem}
tr.changed td:first-child{font-weight:700}
.word{font-weight:700;color:var(--red)}
.meter{display:inline-block;width:5rem;height:.55rem;border-radius:.2rem;background:var(--rule);
overflow:hidden;
vertical-align:.02em;margin-left:.5rem}.meter i{display:block;height:100%;background:var(--sky)}
details>summary{cursor:pointer;color:var(--soft);margin:.6rem 0}
footer{margin-top:3rem;color:var(--soft);font-size:.85rem}
@media print{pre{max-height:none;white-space:pre-wrap}.plots{grid-template-columns:1fr 1fr}
body{max-width:none}}
"""

SCRIPT = """
for(const svg of document.querySelectorAll('svg[data-lines]')){
const lines=JSON.parse(svg.dataset.lines),out=svg.parentNode.querySelector('.values'),
bar=svg.querySelector('.cursor');
svg.addEventListener('pointermove',e=>{
const box=svg.getBoundingClientRect(),x=(e.clientX-box.left)/box.width*svg.viewBox.baseVal.width;
let at=null;const said=[];
for(const line of lines){let best=null;
for(const point of line.at)if(best===null||Math.abs(point[0]-x)<Math.abs(best[0]-x))best=point;
if(best){if(at===null||Math.abs(best[0]-x)<Math.abs(at[0]-x))at=best;said.push(line.label+' '+best[2])}}
if(at){bar.setAttribute('x1',at[0]);bar.setAttribute('x2',at[0]);bar.style.visibility='visible';
out.textContent=at[1]+': '+said.join('  ')}});
svg.addEventListener('pointerleave',()=>{bar.style.visibility='hidden';out.textContent=''})}
"""


def policy() -> str:
    """A content security policy: nothing may be loaded, and of scripts only ours may run."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
