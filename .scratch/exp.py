import torch, time, statistics, sys
import pomona as pm
from torch import nn
from pomona.core.engine import Engine
name,batch,size=sys.argv[1],int(sys.argv[2]),int(sys.argv[3])
x=torch.randn(batch,3,size,size,device='cuda').to(memory_format=torch.channels_last); y=torch.randint(0,10,(batch,),device='cuda')
spent={}
def timed(fn,key):
    def f(*a,**k):
        t=time.perf_counter(); r=fn(*a,**k); spent[key]=spent.get(key,0)+time.perf_counter()-t; return r
    return f
def make(kind):
    torch.manual_seed(0)
    m=pm.models.build(name,num_classes=10).cuda().to(memory_format=torch.channels_last)
    o=torch.optim.SGD(m.parameters(),.1,momentum=.9,nesterov=True,weight_decay=1e-4)
    if kind=='dpf':
        B,A=Engine.before,Engine.after
        Engine.before=timed(B,'before'); Engine.after=timed(A,'after')
        pm.DPF(sparsity=.9).attach(m,o,total_steps=100000)
        Engine.before,Engine.after=B,A
    if kind=='noupdate': pm.DPF(sparsity=.9,every=10**6).attach(m,o,total_steps=10**8)
    if kind=='disabled': 
        o.register_step_pre_hook(torch.compiler.disable(lambda *a: None)); o.register_step_post_hook(torch.compiler.disable(lambda *a: None))
    if kind=='hooks':
        o.register_step_pre_hook(lambda *a: None); o.register_step_post_hook(lambda *a: None)
    def turn():
        for _ in range(16):
            with torch.autocast('cuda',torch.bfloat16): l=nn.functional.cross_entropy(m(x),y)
            o.zero_grad(); l.backward(); o.step()
    return turn
kinds=['dense','dpf','noupdate','disabled','hooks','dense2']
loops={k:make(k) for k in kinds}
times={k:[] for k in kinds}
for r in range(int(sys.argv[4])):
    for k in kinds if r%2 else kinds[::-1]:
        torch.cuda.synchronize(); t=time.perf_counter(); loops[k](); cpu=time.perf_counter()-t; torch.cuda.synchronize(); 
        if r>1: times[k].append(((time.perf_counter()-t)/16*1e3,cpu/16*1e3))
        else: spent.clear()
for k in kinds: print(name,k,'wall %.3f cpu %.3f min %.3f'%(statistics.median(a for a,b in times[k]),statistics.median(b for a,b in times[k]),min(a for a,b in times[k])))
n=16*(len(times['dpf'])); print({k:v/n*1e3 for k,v in spent.items()},'ms per step')
